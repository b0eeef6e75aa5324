"""Contents of one shard: whole groups, leases, and totals that balance. A plain class without sockets.

A group is appended once, then free until it is leased or evicted; a leased group is committed (trained on, gone) or
released (free again). At any time: appended = free + leased + committed + evicted, and no group is in two of them.
Payloads are opaque here; only `append` looks inside, once, to index what it accepts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from asyncrl.buffer.schema import describe, read_batch
from asyncrl.buffer.wire import verify
from asyncrl.errors import ReplayBufferError
from asyncrl.types import GroupRef

NUM_REMEMBERED_IDS = 1 << 16
"""Ids of committed and evicted groups that are remembered (the newest), so that a late repeated append is ignored."""


@dataclass(frozen=True, slots=True)
class BufferStats:
    """Contents and totals of one shard, or of all of them: appended = groups + leased_groups + committed + evicted.

    Attributes:
        groups, rows, tokens, bytes: free groups, those that a lease may take. Tokens as in Group.num_tokens.
        leased_groups, leased_bytes: groups handed out, neither committed nor released. They still take memory.
        appended, committed, evicted: totals in groups since the start.
        shards: the same for every shard, in the order of the address list; empty in the stats of one shard.
    """

    groups: int = 0
    rows: int = 0
    tokens: int = 0
    bytes: int = 0
    leased_groups: int = 0
    leased_bytes: int = 0
    appended: int = 0
    committed: int = 0
    evicted: int = 0
    shards: tuple[BufferStats, ...] = ()

    @classmethod
    def total(cls, shards: Sequence[BufferStats]) -> BufferStats:
        return cls(**{name: sum(getattr(s, name) for s in shards) for name in COUNTERS}, shards=tuple(shards))


COUNTERS = tuple(field.name for field in fields(BufferStats) if field.name != "shards")


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group as held: its index entry, its bytes and the checksum that its writer made."""

    ref: GroupRef
    payload: Any
    checksum: str


class GroupStore:
    """One shard's groups. Used by one thread."""

    def __init__(self) -> None:
        self._held: dict[bytes, StoredGroup] = {}  # free and leased
        self._free: list[tuple[int, bytes]] = []  # (number, group id), sorted
        self._leases: dict[str, tuple[bytes, ...]] = {}
        self._gone: dict[bytes, None] = {}  # committed and evicted ids, oldest first
        self._appended = self._committed = self._evicted = self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all payloads in memory, leased ones included."""
        return self._held_bytes

    def append(self, payload: Any, *, checksum: str) -> bool:
        """Store a group; False when its id was appended before, whatever became of it.

        Raises ReplayBufferError when the bytes do not match the checksum or are not one whole group.
        """
        verify(payload, checksum, what="a group to append")
        ref = describe(read_batch(payload), len(payload))
        if ref.group_id in self._held or ref.group_id in self._gone:
            return False
        self._held[ref.group_id] = StoredGroup(ref, payload, checksum)
        insort(self._free, (ref.number, ref.group_id))
        self._held_bytes += ref.nbytes
        self._appended += 1
        return True

    def read(self, group_id: bytes) -> StoredGroup:
        """A held group, verified. Raises ReplayBufferError when it is not here or no longer what was appended."""
        stored = self._held.get(group_id)
        if stored is None:
            state = "was committed or evicted" if group_id in self._gone else "is not in this shard"
            raise ReplayBufferError(f"group {group_id.hex()} {state}")
        verify(stored.payload, stored.checksum, what=f"group {group_id.hex()} (number {stored.ref.number})")
        return stored

    def evict(self, *, policy_version: int, max_staleness: int) -> list[GroupRef]:
        """Drop free groups with policy_version - min_version > max_staleness; they are counted and returned."""
        oldest = policy_version - max_staleness
        stale = [ref for ref in self._free_refs() if ref.min_version < oldest]
        for ref in stale:
            self._take(ref)
            self._drop(ref.group_id)
        self._evicted += len(stale)
        return stale

    def peek(self, num_groups: int, *, policy_version: int, max_staleness: int) -> list[GroupRef]:
        """The usable free groups with the lowest numbers, at most num_groups, after evicting the stale ones."""
        self.evict(policy_version=policy_version, max_staleness=max_staleness)
        return [self._held[group_id].ref for _, group_id in self._free[: max(num_groups, 0)]]

    def lease(self, lease_id: str, group_ids: Sequence[bytes], *, policy_version: int, max_staleness: int) -> bool:
        """Hand out exactly these groups, or none (False) when one is not free or too stale. It may be repeated."""
        if lease_id in self._leases:
            return set(self._leases[lease_id]) == set(group_ids)
        oldest = policy_version - max_staleness
        asked = set(group_ids)
        wanted = {ref.group_id: ref for ref in self._free_refs() if ref.group_id in asked}
        if len(wanted) != len(group_ids) or any(ref.min_version < oldest for ref in wanted.values()):
            return False
        for ref in wanted.values():
            self._take(ref)
        self._leases[lease_id] = tuple(wanted)
        return True

    def commit(self, lease_id: str) -> int:
        """Remove the groups of a lease for good; how many. 0 for an unknown lease: repeating it is harmless."""
        group_ids = self._leases.pop(lease_id, ())
        for group_id in group_ids:
            self._drop(group_id)
        self._committed += len(group_ids)
        return len(group_ids)

    def release(self, lease_id: str) -> int:
        """Make the groups of a lease free again; how many. 0 for an unknown lease: repeating it is harmless."""
        group_ids = self._leases.pop(lease_id, ())
        for group_id in group_ids:
            insort(self._free, (self._held[group_id].ref.number, group_id))
        return len(group_ids)

    def stats(self) -> BufferStats:
        free = list(self._free_refs())
        free_bytes = sum(ref.nbytes for ref in free)
        return BufferStats(
            groups=len(free),
            rows=sum(ref.num_rows for ref in free),
            tokens=sum(ref.num_tokens for ref in free),
            bytes=free_bytes,
            leased_groups=sum(len(group_ids) for group_ids in self._leases.values()),
            leased_bytes=self._held_bytes - free_bytes,
            appended=self._appended,
            committed=self._committed,
            evicted=self._evicted,
        )

    def _free_refs(self) -> Iterable[GroupRef]:
        return (self._held[group_id].ref for _, group_id in self._free)

    def _take(self, ref: GroupRef) -> None:
        del self._free[bisect_left(self._free, (ref.number, ref.group_id))]

    def _drop(self, group_id: bytes) -> None:
        self._held_bytes -= self._held.pop(group_id).ref.nbytes
        self._gone[group_id] = None
        if len(self._gone) > NUM_REMEMBERED_IDS:
            del self._gone[next(iter(self._gone))]
