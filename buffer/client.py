"""The replay buffer as generators, learners and the coordinator see it: one object over all shards.

    generator --append--> shard --read--> learner rank      (groups: straight to and from the shard that holds them)
                            ^
    coordinator --lease, commit, release, evict, stats--> every shard

A lease takes two phases: ask every shard for its lowest usable numbers, then take the lowest of all, shard by shard;
if one shard no longer has what it offered, everything taken is given back.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import zmq

from asyncrl.buffer.connection import Connection, ShardTimeout
from asyncrl.buffer.keys import CurveKeys, ShardAddress
from asyncrl.buffer.schema import decode_group, encode_group
from asyncrl.buffer.shard import ShardServer
from asyncrl.buffer.store import COUNTERS, BufferStats
from asyncrl.buffer.wire import MAX_FRAME_BYTES, checksum, verify
from asyncrl.errors import ReplayBufferError
from asyncrl.types import Group, GroupRef

_LEASE_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class Lease:
    """Groups handed out to be trained on once.

    Attributes:
        lease_id: for commit or release.
        refs: what was leased, sorted by number.
    """

    lease_id: str
    refs: tuple[GroupRef, ...]


class ReplayBuffer:
    """Client of the shards at `addresses`. Thread-safe. Close it, or use it as a context manager.

    Args:
        addresses: of all shards, in the same order for every client of a run: GroupRef.shard counts in it.
        client_keys: this client's CURVE keys, for shards that have keys.
        prefer: shard that appends go to, one on this machine for instance. None: the one that holds the fewest bytes.
        timeout_s: longest wait for one answer of one shard; then ReplayBufferError, which names the endpoint.

    Example:
        with ReplayBuffer.local() as buffer:
            buffer.append(group)
            lease = buffer.lease(1, policy_version=0, max_staleness=1)
            groups = buffer.read(lease.refs)
            buffer.commit(lease.lease_id)
    """

    def __init__(
        self,
        addresses: Sequence[ShardAddress],
        *,
        client_keys: CurveKeys | None = None,
        prefer: int | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        if not addresses:
            raise ReplayBufferError("a replay buffer needs at least one shard address")
        if prefer is not None and not 0 <= prefer < len(addresses):
            raise ReplayBufferError(f"prefer must be a shard, 0 to {len(addresses) - 1}; got {prefer}")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._prefer = prefer
        self._servers: list[ShardServer] = []
        self._lock = threading.Lock()  # of the three placement fields; a connection has its own
        self._held_bytes = [0] * len(addresses)  # as of the last append to each shard
        self._num_placed = [0] * len(addresses)
        self._in_doubt: dict[bytes, int] = {}  # appends that were not answered: a retry must reach the same shard
        self._shards: list[Connection] = []
        try:
            for address in addresses:
                self._shards.append(Connection(self._context, address, keys=client_keys, timeout_s=timeout_s))
        except ReplayBufferError:
            self.close()
            raise

    @classmethod
    def local(cls, num_shards: int = 2) -> ReplayBuffer:
        """A buffer inside this process: its shards are threads, and close() ends them with their contents."""
        servers = [ShardServer() for _ in range(num_shards)]
        try:
            buffer = cls([server.start() for server in servers])
        except ReplayBufferError:
            for server in servers:
                server.stop()
            raise
        buffer._servers = servers
        return buffer

    def append(self, group: Group) -> bool:
        """Store a group. True when stored, False when its id was appended before.

        After a ReplayBufferError (a timeout above all) the same append may be repeated through the same ReplayBuffer:
        it goes to the same shard, which ignores what it has.
        """
        payload = encode_group(group)
        if payload.size > MAX_FRAME_BYTES:
            raise ReplayBufferError(f"group {group.number} takes {payload.size} bytes; the most is {MAX_FRAME_BYTES}")
        with self._lock:
            shard = self._in_doubt.get(group.group_id, self._place())
            self._in_doubt[group.group_id] = shard
            self._num_placed[shard] += 1
        try:
            reply = self._shards[shard].request("append", {"checksum": checksum(payload)}, [payload])
        except ShardTimeout:
            raise
        except ReplayBufferError:
            self._settle(group.group_id)
            raise
        self._settle(group.group_id)
        self._held_bytes[shard] = reply.integer("held_bytes")
        return bool(reply.header.get("stored"))

    def lease(self, num_groups: int, *, policy_version: int, max_staleness: int) -> Lease | None:
        """Hand out the num_groups usable groups with the lowest numbers, over all shards.

        Usable: policy_version - min_version <= max_staleness; free groups beyond that are evicted first (counted in
        stats). None, and nothing leased, when there are not enough, or other clients took them first.
        """
        if num_groups < 1:
            raise ReplayBufferError(f"a lease needs at least one group; got num_groups = {num_groups}")
        bound = {"policy_version": policy_version, "max_staleness": max_staleness}
        for _ in range(_LEASE_ATTEMPTS):
            offers: list[GroupRef] = []
            for shard, connection in enumerate(self._shards):
                reply = connection.request("peek", {"num_groups": num_groups, **bound})
                offers += reply.refs("refs", shard=shard)
            if len(offers) < num_groups:
                return None
            offers.sort(key=lambda ref: (ref.number, ref.group_id))
            lease = Lease(uuid.uuid4().hex, tuple(offers[:num_groups]))
            if self._take(lease, bound):
                return lease
        return None

    def read(self, refs: Sequence[GroupRef]) -> list[Group]:
        """The groups in the order of `refs`, each checked against its checksum. Their arrays are read-only.

        Raises ReplayBufferError when one was committed or evicted, or is corrupted.
        """
        groups: dict[bytes, Group] = {}
        for shard, connection in enumerate(self._shards):
            ids = [ref.group_id.hex() for ref in refs if ref.shard == shard]
            if not ids:
                continue
            reply = connection.request("read", {"group_ids": ids})
            for group_id, expected, payload in zip(ids, reply.items("checksums"), reply.payloads, strict=True):
                verify(payload, expected, what=f"group {group_id} from {connection.endpoint}")
                groups[bytes.fromhex(group_id)] = decode_group(payload)
        return [groups[ref.group_id] for ref in refs]

    def commit(self, lease_id: str) -> None:
        """Remove a lease's groups for good, after the optimizer step. Repeating it is harmless."""
        self._all("commit", {"lease_id": lease_id})

    def release(self, lease_id: str) -> None:
        """Give a lease's groups back unused. Repeating it is harmless."""
        self._all("release", {"lease_id": lease_id})

    def evict(self, *, policy_version: int, max_staleness: int) -> list[GroupRef]:
        """Drop the free groups with policy_version - min_version > max_staleness; they are returned and counted."""
        replies = self._all("evict", {"policy_version": policy_version, "max_staleness": max_staleness})
        return [ref for shard, reply in enumerate(replies) for ref in reply.refs("refs", shard=shard)]

    def stats(self) -> BufferStats:
        """Contents and totals, summed over the shards and per shard."""
        replies = self._all("stats", {})
        return BufferStats.total([BufferStats(**{n: reply.integer(n) for n in COUNTERS}) for reply in replies])

    def close(self) -> None:
        """Close the connections (and the shards of `local`). Repeating it is harmless."""
        for connection in self._shards:
            connection.close()
        self._context.destroy(linger=0)
        for server in self._servers:
            server.stop()

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _all(self, op: str, fields: dict[str, Any]) -> list[Any]:
        return [connection.request(op, fields) for connection in self._shards]

    def _place(self) -> int:
        if self._prefer is not None:
            return self._prefer
        return min(range(len(self._shards)), key=lambda shard: (self._held_bytes[shard], self._num_placed[shard]))

    def _settle(self, group_id: bytes) -> None:
        with self._lock:
            self._in_doubt.pop(group_id, None)

    def _take(self, lease: Lease, bound: dict[str, int]) -> bool:
        # In ascending order, so that of several clients after the same groups one gets through.
        asked: list[Connection] = []
        complete = False
        try:
            for shard in sorted({ref.shard for ref in lease.refs}):
                ids = [ref.group_id.hex() for ref in lease.refs if ref.shard == shard]
                asked.append(self._shards[shard])
                reply = asked[-1].request("lease", {"lease_id": lease.lease_id, "group_ids": ids, **bound})
                if not reply.header.get("granted"):
                    return False
            complete = True
        finally:
            if not complete:
                # Not awaited: each shard sees it after the lease request, also one that answers late.
                for connection in asked:
                    connection.post("release", {"lease_id": lease.lease_id})
        return True
