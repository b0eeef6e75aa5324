"""Who may start a group, and when: the first of the two mechanisms behind the staleness bound.

Groups are trained in the order of their numbers, `groups_per_step` at a time. With `outstanding` groups started and
neither trained nor lost, a new one is trained by the optimizer step that leaves version

    policy_version + outstanding // groups_per_step

so an engine at `engine_version` may start it only if that is at most `max_staleness` versions ahead. Rollouts that
overtake each other can still break the estimate; the buffer evicts those, and the metrics count them.
"""

from __future__ import annotations


class Admission:
    """Counts the groups between a ticket and the optimizer step that trains them.

    Invariant: `outstanding` = tickets given - trained - lost, never negative, and never more than
    (max_staleness + 1) * groups_per_step. This bound is also the back-pressure: a learner that stops, stops generation.
    With paced = False only the second limit holds: no more groups than the run still needs.
    """

    def __init__(self, *, groups_per_step: int, max_staleness: int, num_steps: int, paced: bool = True) -> None:
        self.groups_per_step = groups_per_step
        self.paced = paced
        self.max_staleness = max_staleness
        self.num_steps = num_steps
        self.policy_version = 0
        self.outstanding = 0

    def num_startable(self, *, engine_version: int) -> int:
        """Groups that an engine at this version may start now; no more than the run still needs."""
        lag = self.policy_version - engine_version
        allowed = (self.max_staleness + 1 - lag) * self.groups_per_step
        needed = (self.num_steps - self.policy_version) * self.groups_per_step
        return max(0, (min(allowed, needed) if self.paced else needed) - self.outstanding)

    def start(self, num_groups: int) -> None:
        """Count groups whose tickets were given."""
        self.outstanding += num_groups

    def lose(self, num_groups: int) -> None:
        """Count groups that failed or were evicted: their places may be given again."""
        self.outstanding -= num_groups
        assert self.outstanding >= 0, "a group was lost twice"

    def train(self, num_groups: int) -> None:
        """Count groups that left with the optimizer step that makes the next version."""
        self.outstanding -= num_groups
        assert self.outstanding >= 0, "a group was trained twice"
        self.policy_version += 1
