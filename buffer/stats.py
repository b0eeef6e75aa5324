"""What a shard, or all of them, holds and has seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class BufferStats:
    """Contents and totals of one shard, or of all; the LEDGER counters and `groups` add up (is_balanced).

    Attributes:
        groups, rows, tokens, bytes: free groups, those that a lease may take. Tokens as in Group.num_tokens.
        leased_groups, leased_bytes: groups handed out, neither committed nor released. They still take memory.
        held_bytes: of all segment files, dead groups and room for new ones included.
        appended, committed, evicted, quarantined: totals in groups since the start; a group that is used several times
            is committed with its last use.
        uses: how often groups were trained on.
        committed_rows, committed_tokens, committed_reward: sums over the committed groups (reward: of their means).
        evicted_rows, evicted_tokens, evicted_reward: over the evicted, so that a bias of what is dropped shows.
        shards: the same for every shard, in the order of the address list; empty in the stats of one shard.
    """

    groups: int = 0
    rows: int = 0
    tokens: int = 0
    bytes: int = 0
    leased_groups: int = 0
    leased_bytes: int = 0
    held_bytes: int = 0
    appended: int = 0
    committed: int = 0
    evicted: int = 0
    quarantined: int = 0
    uses: int = 0
    committed_rows: int = 0
    committed_tokens: int = 0
    committed_reward: float = 0.0
    evicted_rows: int = 0
    evicted_tokens: int = 0
    evicted_reward: float = 0.0
    shards: tuple[BufferStats, ...] = ()

    @classmethod
    def total(cls, shards: Sequence[BufferStats]) -> BufferStats:
        return cls(**{name: sum(getattr(s, name) for s in shards) for name in COUNTERS}, shards=tuple(shards))

    @property
    def is_balanced(self) -> bool:
        """Whether every appended group is accounted for."""
        gone = self.committed + self.evicted + self.quarantined
        return self.appended == self.groups + self.leased_groups + gone


LEDGER = ("appended", "leased_groups", "committed", "evicted", "quarantined")
"""The counters that must add up, see BufferStats.is_balanced."""
COUNTERS = tuple(field.name for field in fields(BufferStats) if field.name != "shards")
TOTALS = COUNTERS[COUNTERS.index("appended") :]
"""Counters that only grow."""
