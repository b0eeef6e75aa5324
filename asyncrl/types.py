"""Values that cross between the parts. numpy only: imports neither torch nor ray.

A *ticket* is the right to start one group; a *rollout* is one sampled completion; a *group* is the rollouts of one
prompt, appended, leased and evicted whole. `policy_version` counts optimizer steps: version 0 is the initial model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a prompt source, tokenized once.

    Attributes:
        prompt_id: source name and row number, e.g. "prompts.jsonl:17".
        tokens: token ids exactly as the engine will see them.
        text: the text those ids came from (the chat template applied).
        row: every column of the row, as the reward function receives it.
    """

    prompt_id: str
    tokens: list[int]
    text: str
    row: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ticket:
    """The coordinator's permission to start one group.

    Attributes:
        number: position in the run, unique and increasing; groups are trained in this order.
        prompt: what to sample from.
        group_size: rollouts to sample.
        seed: base of the per-rollout seeds (rollout i uses seed + i).
    """

    number: int
    prompt: Prompt
    group_size: int
    seed: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion with everything needed to train on it. R is the number of tokens after the prompt.

    Attributes:
        response: int32 [R], ids as sampled (and, later, tool tokens); never re-tokenised.
        loss_mask: bool [R], True where the policy sampled the token.
        behaviour_logprobs: float32 [R], under the distribution that was sampled from; 0 where not sampled.
        policy_versions: int32 [R], version that sampled each token; -1 where not sampled.
        reward: NaN when scoring failed (`error` says why); such a rollout is never trained on.
        reward_parts: named parts of the reward, may be empty.
        finish_reason: one of FINISH_REASONS.
        seconds: from submission to the last token.
    """

    response: np.ndarray
    loss_mask: np.ndarray
    behaviour_logprobs: np.ndarray
    policy_versions: np.ndarray
    reward: float
    finish_reason: str
    seconds: float
    reward_parts: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    @property
    def min_version(self) -> int:
        """Oldest version that sampled a token of this rollout; staleness is measured from it."""
        sampled = self.policy_versions[self.loss_mask]
        return int(sampled.min()) if sampled.size else -1


@dataclass(frozen=True, slots=True)
class Group:
    """All rollouts of one prompt: the unit of the replay buffer.

    Attributes:
        group_id: 16 bytes; appending the same id twice is one append.
        number: the ticket's number.
        prompt_tokens: int32 [P], shared by all rollouts.
        created_at: unix seconds.
    """

    group_id: bytes
    number: int
    prompt_id: str
    prompt_tokens: np.ndarray
    rollouts: tuple[Rollout, ...]
    generator: str
    created_at: float

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows as the learner sees them, the prompt counted once per rollout."""
        return sum(self.prompt_tokens.size + r.response.size for r in self.rollouts)

    @property
    def min_version(self) -> int:
        """Oldest policy version in the group, of the rollouts that sampled a token; -1 without any."""
        return min((r.min_version for r in self.rollouts if r.min_version >= 0), default=-1)


@dataclass(frozen=True, slots=True)
class GroupRef:
    """Index entry of a stored group: enough to order, balance and bound without reading it.

    Attributes:
        shard: position of the shard in the buffer's address list.
        num_tokens: as Group.num_tokens.
        max_tokens: tokens of the longest row, prompt included.
        min_version, max_version: oldest and newest policy version that sampled a token of the group.
        nbytes: of the stored Arrow message.
        reward_mean, reward_std: over the scored rollouts of the group (population std); NaN without any.
    """

    shard: int
    group_id: bytes
    number: int
    num_rows: int
    num_tokens: int
    max_tokens: int
    min_version: int
    max_version: int
    nbytes: int
    reward_mean: float
    reward_std: float
