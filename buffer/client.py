"""The replay buffer as generators, learners and the coordinator see it: one object over all shards.

    generator --append--> shard --read--> learner rank      (groups: straight to and from the shard that holds them)
                            ^
    coordinator --lease, commit, release, evict, stats--> every shard

A lease takes two phases: ask every shard for its first usable groups, then take the first of all, shard by shard; if
one shard no longer has what it offered, everything taken is given back.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import zmq

from asyncrl.buffer.columns import Columns, read_columns
from asyncrl.buffer.connection import Connection, request_all
from asyncrl.buffer.keys import CurveKeys, ShardAddress
from asyncrl.buffer.records import unpack_records
from asyncrl.buffer.remote import Location, RemoteShard, Result
from asyncrl.buffer.sampling import FIFO, Sampling
from asyncrl.buffer.schema import EncodedGroup, decode_group, encode_groups, read_batch
from asyncrl.buffer.segment_table import StoreSettings
from asyncrl.buffer.shard import ShardServer
from asyncrl.buffer.snapshot import MANIFEST, read_groups, read_manifest, write_manifest
from asyncrl.buffer.stats import COUNTERS, BufferStats
from asyncrl.buffer.store import NUM_REMEMBERED_IDS
from asyncrl.buffer.wire import MAX_FRAME_BYTES
from asyncrl.errors import ReplayBufferError
from asyncrl.types import Group, GroupRef

LEASE_TIMEOUT_S = 60.0
_LEASE_ATTEMPTS = 8
_RENEWALS_PER_TIMEOUT = 4
_RESTORE_BATCH = 64
_POLL_S = 0.02
"""Between two questions for room in a full shard, or for the end of a snapshot: a shard never calls back."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Groups handed out to be trained on.

    Attributes:
        lease_id: 16 bytes.
        refs: what was leased, in the order of the sampling.
        max_uses: of the sampling that chose them.
    """

    lease_id: bytes
    refs: tuple[GroupRef, ...]
    max_uses: int = 1


class ReplayBuffer:
    """Client of the shards at `addresses`. Thread-safe. Close it, or use it as a context manager.

    Appends go to shards on this host, where there are any; of these to the one that holds the fewest bytes.

    Args:
        addresses: of all shards, in the same order for every client of a run: GroupRef.shard counts in it.
        client_keys: this client's CURVE keys, for shards that have keys.
        timeout_s: longest wait for one answer of one shard, or for room in a full one; then ReplayBufferError.

    Example:
        with ReplayBuffer.local() as buffer:
            buffer.append(group)
            lease = buffer.lease(1, policy_version=0, max_staleness=1)
            groups = buffer.read(lease.refs)
            buffer.commit(lease)
    """

    def __init__(
        self,
        addresses: Sequence[ShardAddress],
        *,
        client_keys: CurveKeys | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        if not addresses:
            raise ReplayBufferError("a replay buffer needs at least one shard address")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._client_keys = client_keys
        self._timeout_s = timeout_s
        self._servers: list[ShardServer] = []
        self._lock = threading.Lock()  # of the fields below; a shard has its own
        self._num_placed: list[int] = []
        self._placed: OrderedDict[bytes, int] = OrderedDict()  # group -> shard, the newest: a retry must go there again
        self._shards: list[RemoteShard] = []
        self.addresses: list[ShardAddress] = []
        self._num_draws = 0
        self._leases: dict[bytes, tuple[set[int], float]] = {}  # held by this client -> (their shards, timeout)
        self._located: dict[bytes, Location] = {}  # of the groups in those leases
        self._renewal: threading.Thread | None = None
        self._renew_anew = threading.Event()  # a lease was added, or the client closed
        self._closed = False
        try:
            for address in addresses:
                self.add_shard(address)
        except ReplayBufferError:
            self.close()
            raise

    @classmethod
    def local(
        cls, num_shards: int = 2, *, directory: str | None = None, settings: StoreSettings | None = None
    ) -> ReplayBuffer:
        """A buffer inside this process: its shards are threads. close() ends them, with their contents unless they
        have a directory; the same directory and number of shards continue there."""
        names = [None if directory is None else Path(directory) / f"shard-{i}" for i in range(num_shards)]
        servers = [ShardServer(name, settings=settings) for name in names]
        try:
            buffer = cls([server.start() for server in servers])
        except ReplayBufferError:
            for server in servers:
                server.stop()
            raise
        buffer._servers = servers
        return buffer

    # Shards

    def add_shard(self, address: ShardAddress) -> int:
        """Use another shard from now on; its position. Every client of a run adds the same shards in the same order."""
        connection, renewals = (
            Connection(self._context, address, keys=self._client_keys, timeout_s=self._timeout_s) for _ in range(2)
        )
        shard = RemoteShard(connection, renewals=renewals)
        with self._lock:
            self.addresses.append(address)
            self._shards.append(shard)
            self._num_placed.append(0)
            return len(self._shards) - 1

    def drain_shard(self, shard: int) -> None:
        """The shard takes no more groups, from any client. What it holds is leased, or ages out, as usual."""
        self._shards[shard].request("drain", {})
        self._shards[shard].draining = True

    # Writing

    def append(self, group: Group) -> bool:
        """Store a group. True when stored, False when its id was appended before.

        After a ReplayBufferError (a timeout above all) the same append may be repeated through the same ReplayBuffer:
        it goes to the same shard, which ignores what it has.
        """
        return self.append_many([group])[0]

    def append_many(self, groups: Sequence[Group]) -> list[bool]:
        """As append for each, at a fraction of the cost per group.

        Raises ReplayBufferError when one is malformed (then none is stored) or refused (then the others are stored).
        """
        return self.append_encoded(encode_groups(groups))

    def append_encoded(self, encoded: Sequence[EncodedGroup]) -> list[bool]:
        """As append_many for groups in their stored form."""
        for group in encoded:
            if group.message.size > MAX_FRAME_BYTES:
                raise ReplayBufferError(
                    f"group {group.ref.number} takes {group.message.size} bytes; the most is {MAX_FRAME_BYTES}"
                )
        results: dict[int, Result] = {}
        deadline = time.monotonic() + self._timeout_s
        while len(results) < len(encoded):
            for shard, indices in self._place([i for i in range(len(encoded)) if i not in results], encoded).items():
                answers = self._shards[shard].append([encoded[i] for i in indices])
                for i, answer in zip(indices, answers, strict=True):
                    if answer is None:
                        self._unplace(encoded[i].ref.group_id)
                    else:
                        results[i] = answer
            if len(results) < len(encoded):
                if time.monotonic() > deadline:
                    raise ReplayBufferError(self._explain_full(len(encoded) - len(results)))
                time.sleep(_POLL_S)
        refused = [answer for answer in results.values() if isinstance(answer, str)]
        if refused:
            raise ReplayBufferError(f"{len(refused)} of {len(encoded)} groups were refused: {refused[0]}")
        return [bool(results[i]) for i in range(len(encoded))]

    # Leases

    def advance(self, policy_version: int) -> None:
        """Tell every shard the newest policy version, before its weights reach a generator.

        From the first call of this or of lease and evict on, a group with tokens of a later version is refused.
        """
        self._all("advance", {"policy_version": policy_version})

    def lease(
        self,
        num_groups: int,
        *,
        policy_version: int,
        max_staleness: int,
        sampling: Sampling = FIFO,
        max_tokens: int | None = None,
        timeout_s: float = LEASE_TIMEOUT_S,
    ) -> Lease | None:
        """Hand out the first num_groups usable groups in the order of `sampling`, over all shards.

        Usable: policy_version - min_version <= max_staleness; free groups beyond that are evicted first (counted in
        stats). With max_tokens, no more of them than fit that many tokens (one at least). None, and nothing leased,
        when there are not enough, or other clients took them first.

        This client renews the lease until it is committed or released; timeout_s after the client's death its groups
        are free again.
        """
        if num_groups < 1:
            raise ReplayBufferError(f"a lease needs at least one group; got num_groups = {num_groups}")
        bound = {"policy_version": policy_version, "max_staleness": max_staleness}
        for _ in range(_LEASE_ATTEMPTS):
            offers = self._best_offers(num_groups, bound, sampling)
            if len(offers) < num_groups:
                return None
            lease = Lease(uuid.uuid4().bytes, _within([ref for ref, _ in offers], max_tokens), sampling.max_uses)
            if self._take(lease, bound | {"timeout_s": timeout_s}):
                self._hold(lease, {ref.group_id: location for ref, location in offers}, timeout_s)
                return lease
        return None

    def commit(self, lease: Lease) -> None:
        """The lease's groups were trained on: remove them, or count a use. Repeating it is harmless.

        Raises ReplayBufferError when the lease had run out and a group was handed out again meanwhile.
        """
        self._forget(lease)
        fields = {"lease": lease.lease_id.hex(), "max_uses": lease.max_uses}
        by_shard = sorted(_by_shard(lease.refs).items())
        request_all([(self._shards[i].connection, "commit", fields, [b"".join(ids)]) for i, ids in by_shard])

    def release(self, lease: Lease) -> None:
        """Give a lease's groups back unused. Repeating it is harmless."""
        self._forget(lease)
        for shard in _by_shard(lease.refs):
            self._shards[shard].request("release", {"lease": lease.lease_id.hex()})

    # Reading

    def read(self, refs: Sequence[GroupRef]) -> list[Group]:
        """The groups in the order of `refs`, each checked against its checksum. Their arrays are read-only.

        Raises ReplayBufferError when one was committed or evicted, or is corrupted.
        """
        return [decode_group(message) for message in self._read(refs)]

    def read_batches(self, refs: Sequence[GroupRef]) -> list[pa.RecordBatch]:
        """As read, as Arrow record batches of schema.SCHEMA: no array is copied."""
        return [read_batch(message) for message in self._read(refs)]

    def read_columns(self, refs: Sequence[GroupRef]) -> Columns:
        """As read, all groups together as a few flat arrays: the least work for many groups."""
        return read_columns(self._read(refs))

    def evict(self, *, policy_version: int, max_staleness: int) -> list[bytes]:
        """Drop the free groups with policy_version - min_version > max_staleness; their ids. They are counted."""
        replies = self._all("evict", {"policy_version": policy_version, "max_staleness": max_staleness})
        return [bytes.fromhex(group_id) for reply in replies for group_id in reply.items("ids")]

    def stats(self) -> BufferStats:
        """Contents and totals, summed over the shards and per shard."""
        replies = self._all("stats", {})
        return BufferStats.total([BufferStats(**{n: reply.header[n] for n in COUNTERS}) for reply in replies])

    # Snapshots

    def snapshot(self, directory: str | Path, *, policy_version: int, timeout_s: float = 600.0) -> int:
        """Write every held group (leased ones too) to a folder, while writes and leases go on; how many groups.

        What a shard holds when it is asked is in the snapshot, so nothing should be committed during the call that
        must not be. The folder is valid once its manifest is there, which is last; shards must reach it.
        """
        directory = Path(directory).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MANIFEST).unlink(missing_ok=True)
        names = [f"shard-{i}.arrow" for i in range(len(self._shards))]
        for name, shard in zip(names, self._shards, strict=True):
            shard.request("snapshot", {"path": str(directory / name)})
        files: dict[str, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        for name, shard in zip(names, self._shards, strict=True):
            while not (reply := shard.request("snapshot_state", {})).header.get("done"):
                if time.monotonic() > deadline:
                    raise ReplayBufferError(f"shard {shard.endpoint} did not finish its snapshot in {timeout_s:g} s")
                time.sleep(_POLL_S)
            files[name] = {key: reply.header[key] for key in ("num_groups", "num_bytes", "xxh3", "uses")}
        write_manifest(directory, files, policy_version=policy_version)
        return sum(file["num_groups"] for file in files.values())

    def restore(self, directory: str | Path) -> int:
        """Append every group of a snapshot, on whatever shards there are; the snapshot's policy version.

        Raises ReplayBufferError, with nothing appended, when a file is missing, truncated or changed.
        """
        directory = Path(directory)
        manifest = read_manifest(directory)
        for name, file in manifest["files"].items():
            batch: list[EncodedGroup] = []
            for group in read_groups(directory / name, file["uses"]):
                batch.append(group)
                if len(batch) == _RESTORE_BATCH:
                    self.append_encoded(batch)
                    batch = []
            self.append_encoded(batch)
        return int(manifest["policy_version"])

    def close(self) -> None:
        """Close the connections (and the shards of `local`). Repeating it is harmless."""
        self._closed = True
        self._renew_anew.set()
        if self._renewal is not None:
            self._renewal.join()
            self._renewal = None
        for shard in self._shards:
            shard.close()
        self._context.destroy(linger=0)
        for server in self._servers:
            server.stop()

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, refs: Sequence[GroupRef]) -> list[Any]:
        """Their verified messages."""
        messages: dict[bytes, Any] = {}
        for shard, ids in _by_shard(refs).items():
            messages |= self._shards[shard].read({group_id: self._located.get(group_id) for group_id in ids})
        return [messages[ref.group_id] for ref in refs]

    def _all(self, op: str, fields: dict[str, Any]) -> list[Any]:
        return request_all([(shard.connection, op, fields, ()) for shard in self._shards])

    def _place(self, indices: Iterable[int], encoded: Sequence[EncodedGroup]) -> dict[int, list[int]]:
        """Shard -> which groups go there: all to the emptiest, but for those that were tried before."""
        open_shards = [i for i, shard in enumerate(self._shards) if not shard.draining]
        if not open_shards:
            raise ReplayBufferError("every shard of the replay buffer is draining: none takes groups")
        open_shards = [i for i in open_shards if self._shards[i].is_local] or open_shards
        with self._lock:
            emptiest = min(open_shards, key=lambda i: (self._shards[i].group_bytes, self._num_placed[i]))
            placed: dict[int, list[int]] = {}
            for i in indices:
                shard = self._placed.setdefault(encoded[i].ref.group_id, emptiest)
                self._num_placed[shard] += 1
                placed.setdefault(shard, []).append(i)
            while len(self._placed) > NUM_REMEMBERED_IDS:
                self._placed.popitem(last=False)
            return placed

    def _unplace(self, group_id: bytes) -> None:
        """The shard is full or draining, and has not taken it: any other may."""
        with self._lock:
            self._placed.pop(group_id, None)

    def _explain_full(self, num_groups: int) -> str:
        held = sum(shard.group_bytes for shard in self._shards)
        return (
            f"the replay buffer is full: {num_groups} groups found no room within {self._timeout_s:g} s while "
            f"its shards hold {held / 1e6:.0f} MB. Raise [buffer] capacity_gb, add shards, or lower max_staleness"
        )

    def _best_offers(
        self, num_groups: int, bound: dict[str, int], sampling: Sampling
    ) -> list[tuple[GroupRef, Location]]:
        with self._lock:
            self._num_draws += 1
            draw = f"{bound['policy_version']} {self._num_draws}"
        fields = {
            "num_groups": num_groups,
            **bound,
            "order": sampling.order,
            "max_uses": sampling.max_uses,
            "seed": sampling.seed,
        }
        offers: list[tuple[list[float], bytes, GroupRef, Location]] = []
        requests = [
            (shard.connection, "offer", fields | {"draw": f"{draw} {index}"}, ())
            for index, shard in enumerate(self._shards)
        ]
        for index, reply in enumerate(request_all(requests)):
            entries = [record.entry for record in unpack_records(reply.frame(), index)]
            for key, entry, path in zip(reply.items("keys"), entries, reply.items("paths"), strict=True):
                offers.append((key, entry.ref.group_id, entry.ref, (entry, path)))
        offers.sort(key=lambda offer: offer[:2])
        return [(ref, location) for _, _, ref, location in offers[:num_groups]]

    def _take(self, lease: Lease, fields: Mapping[str, Any]) -> bool:
        # In ascending order, so that of several clients after the same groups one gets through.
        asked: list[RemoteShard] = []
        complete = False
        try:
            for index, ids in sorted(_by_shard(lease.refs).items()):
                asked.append(self._shards[index])
                request = {"lease": lease.lease_id.hex(), **fields}
                if not asked[-1].request("lease", request, [b"".join(ids)]).header.get("granted"):
                    return False
            complete = True
        finally:
            if not complete:
                # Not awaited: each shard sees it after the lease request, also one that answers late.
                for shard in asked:
                    shard.post("release", {"lease": lease.lease_id.hex()})
        return True

    def _hold(self, lease: Lease, located: Mapping[bytes, Location], timeout_s: float) -> None:
        """Remember a lease, and renew it from now on."""
        with self._lock:
            self._leases[lease.lease_id] = (set(_by_shard(lease.refs)), timeout_s)
            self._located |= {ref.group_id: located[ref.group_id] for ref in lease.refs}
            if self._renewal is None and not self._closed:
                self._renewal = threading.Thread(target=self._renew_leases, name="lease renewal", daemon=True)
                self._renewal.start()
            self._renew_anew.set()

    def _forget(self, lease: Lease) -> None:
        with self._lock:
            self._leases.pop(lease.lease_id, None)
            for ref in lease.refs:
                self._located.pop(ref.group_id, None)

    def _renew_leases(self) -> None:
        """Renew all leases several times within the shortest of their timeouts."""
        renewed_at = time.monotonic()
        while not self._closed:
            with self._lock:
                held = dict(self._leases)
            shortest = min((timeout_s for _, timeout_s in held.values()), default=LEASE_TIMEOUT_S)
            due_in = renewed_at + shortest / _RENEWALS_PER_TIMEOUT - time.monotonic()
            if due_in > 0 and self._renew_anew.wait(due_in):
                self._renew_anew.clear()
                continue
            renewed_at = time.monotonic()
            for index, shard in enumerate(self._shards):
                if leases := [lease for lease, (shards, _) in held.items() if index in shards]:
                    shard.renew(leases)


def _by_shard(refs: Iterable[GroupRef]) -> dict[int, list[bytes]]:
    ids: dict[int, list[bytes]] = {}
    for ref in refs:
        ids.setdefault(ref.shard, []).append(ref.group_id)
    return ids


def _within(refs: Sequence[GroupRef], max_tokens: int | None) -> tuple[GroupRef, ...]:
    if max_tokens is None:
        return tuple(refs)
    total = np.cumsum([ref.num_tokens for ref in refs])
    return tuple(refs[: max(1, int(np.searchsorted(total, max_tokens, side="right")))])
