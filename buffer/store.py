"""Contents of one shard: whole groups, leases, and totals that balance. A plain class without sockets.

A group is appended once, then free until it is leased or evicted; a leased group is committed (trained on) or released
(free again); after its last use it is gone. At any time

    appended = free + leased + committed + evicted + quarantined

and no group is in two of them. Every change is a record in the shard's log before it is made, so that another process
continues from the files where a killed one was: a store opened on a directory is in the state that the last one left.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from asyncrl.buffer.log import LOG, ShardLog, check_log
from asyncrl.buffer.records import NO_ID, Entry, Kind, Record, pack_entry, pack_event
from asyncrl.buffer.sampling import FIFO, FreeGroups, Offer, Sampling
from asyncrl.buffer.schema import SCHEMA_VERSION, describe, read_batch
from asyncrl.buffer.segment_table import Segment, SegmentTable, StoreSettings, segment_files
from asyncrl.buffer.segments import (
    PREFIX,
    WRITERS,
    SegmentReader,
    SegmentWriter,
    WriterLock,
    aligned,
    metadata_length,
    schema_version_of,
)
from asyncrl.buffer.stats import TOTALS, BufferStats
from asyncrl.errors import ReplayBufferError
from asyncrl.types import GroupRef

NUM_REMEMBERED_IDS = 1 << 14
"""Ids of groups that are gone, the newest ones, so that a late repeated append or commit is recognised."""
MAX_LEASE_S = 1e9
_SELF = b"the shard itself"


@dataclass(slots=True)
class Held:
    """A group in the shard: free when lease is NO_ID."""

    entry: Entry
    lease: bytes = NO_ID
    uses: int = 0
    last_use: bytes = NO_ID  # the lease of the latest of them

    @property
    def ref(self) -> GroupRef:
        return self.entry.ref


class GroupStore:
    """One shard's groups, in `directory`. Used by one thread.

    Args:
        now: clock of the lease timeouts, in seconds.
    """

    def __init__(
        self, directory: Path, settings: StoreSettings | None = None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        settings = settings or StoreSettings()
        check_files(directory, settings)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / WRITERS).mkdir(exist_ok=True)
        self._now = now
        self._sync = settings.durability == "fsync"
        self._log = ShardLog(directory / LOG, sync=self._sync)
        self._clear(directory, settings, log=self._log.write)
        for record in self._log.read():
            self._apply(record)
        self._segments.recover()
        self._seal_own()
        for lease_id, (_, timeout_s) in self._deadlines.items():  # their holders may live: let them renew
            self._deadlines[lease_id] = (self._now() + timeout_s, timeout_s)

    @classmethod
    def as_logged(cls, directory: Path, records: Iterable[Record]) -> GroupStore:
        """What these records of a shard's log lead to, for stats() and held_entries() alone: no file is touched.

        Raises ReplayBufferError when the records contradict each other.
        """
        store = cls.__new__(cls)
        store._now = time.monotonic
        store._clear(directory, StoreSettings(), log=lambda _: None)
        for index, record in enumerate(records):
            try:
                store._apply(record)
            except (LookupError, AttributeError) as error:
                raise ReplayBufferError(
                    f"{directory / LOG}, record {index}: it contradicts those before it ({record.kind.name} {error})"
                ) from error
        return store

    def _clear(self, directory: Path, settings: StoreSettings, *, log: Callable[[bytes], None]) -> None:
        """The state before the first record."""
        self.directory = directory
        self.policy_version: int | None = None
        self._keep = settings.keep
        self._segments = SegmentTable(directory, settings, log=log)
        self._reader = SegmentReader()
        self._writer = SegmentWriter()
        self._held: dict[bytes, Held] = {}
        self._free = FreeGroups()
        self._leases: dict[bytes, dict[bytes, None]] = {}
        self._deadlines: dict[bytes, tuple[float, float]] = {}  # lease -> (when it ends, its timeout)
        self._gone: dict[bytes, bytes] = {}  # id -> lease that it was committed under, or NO_ID; oldest first
        self._totals: dict[str, Any] = dict.fromkeys(TOTALS, 0)
        self._leased_bytes = 0

    # Writing

    def grant(self, writer: bytes, num_bytes: int, *, seal: int = -1) -> Segment | None:
        """A segment for this writer with room for that many bytes; None: the shard is full.

        A writer has one at a time: `seal`, which it is done with, and any other that it wrote to are closed. An
        untouched one is given again, so that the request may be repeated.
        """
        for segment in self._segments.open_segments():
            if segment.writer == writer:
                untouched = segment.number != seal and not segment.blocks
                if untouched and len(PREFIX) + aligned(num_bytes) <= segment.capacity:
                    return segment
                self._segments.seal(segment)
        return self._segments.grant(writer, num_bytes)

    def append(self, entries: Sequence[Entry], *, writer: bytes) -> list[bool | str]:
        """Take over groups that the writer wrote into its segment: each is stored (True), was before (False), or is
        refused with a reason: not there as described, or sampled by a policy version that is yet to come.

        Raises ReplayBufferError, with nothing stored, when the log cannot be written.
        """
        results: list[bool | str] = []
        accepted: dict[bytes, Entry] = {}
        for entry in entries:
            try:
                new = entry.ref.group_id not in accepted and not self.knows(entry.ref.group_id)
                if new:
                    self._check(entry, writer)
                    accepted[entry.ref.group_id] = entry
                results.append(new)
            except ReplayBufferError as error:
                results.append(str(error))
        if self._sync:
            for segment in {entry.segment for entry in accepted.values()}:
                self._reader.sync(self._segments[segment].path)
        if accepted:
            self._log.write(b"".join(pack_entry(entry) for entry in accepted.values()), grows=True)
        for entry in accepted.values():
            self._add(entry)
        self._totals["appended"] += len(accepted)
        return results

    def knows(self, group_id: bytes) -> bool:
        """Whether this group was appended before, whatever became of it (of those that are gone, the newest)."""
        return group_id in self._held or group_id in self._gone

    def append_message(self, message: Any, *, checksum: int, uses: int = 0) -> bool | None:
        """Store a group that came as an Arrow message; False when its id was appended before, None: the shard is full.

        Raises ReplayBufferError when the bytes do not match the checksum or are not one whole group.
        """
        if xxhash.xxh3_64_intdigest(message) != checksum:
            raise ReplayBufferError("a group to append is corrupted: its xxh3 checksum does not match")
        ref = describe(read_batch(message), len(message))
        if self.knows(ref.group_id):
            return False
        offset = self._writer.write(message)
        if offset is None:
            segment = self.grant(_SELF, len(message), seal=self._writer.number)
            if segment is None:
                return None
            self._writer.start(segment.number, segment.path, segment.capacity)
            offset = self._writer.write(message, or_fail=True)
            assert offset is not None
        entry = Entry(ref, self._writer.number, offset, metadata_length(message), checksum, uses)
        (result,) = self.append([entry], writer=_SELF)
        if isinstance(result, str):
            raise ReplayBufferError(result)
        return result

    def seal_dead_writers(self) -> int:
        """Close the segments of writers whose process is gone; how many."""
        dead = [
            s
            for s in self._segments.open_segments()
            if s.writer != _SELF and not WriterLock.is_held(self.directory / WRITERS / s.writer.hex())
        ]
        for segment in dead:
            (self.directory / WRITERS / segment.writer.hex()).unlink(missing_ok=True)
            self._segments.seal(segment)
        return len(dead)

    # Reading

    def locate(self, group_id: bytes) -> tuple[Entry, str]:
        """A held group's entry and the file that it lies in. Raises ReplayBufferError when it is not here."""
        held = self._held.get(group_id)
        if held is None:
            state = "is gone: committed, evicted or quarantined" if group_id in self._gone else "is not in this shard"
            raise ReplayBufferError(f"group {group_id.hex()} {state}")
        return held.entry, self._segments[held.entry.segment].path

    def read(self, group_id: bytes) -> bytes:
        """The Arrow message of a held group, verified.

        Raises ReplayBufferError when it is not here, or damaged: then it is given up, and its segment stays as it is.
        """
        entry, path = self.locate(group_id)
        try:
            return self._verify(entry, path)
        except ReplayBufferError as error:
            self._log.write(pack_event(Kind.QUARANTINE, group_id=group_id))
            self._quarantine(group_id)
            raise ReplayBufferError(f"{error}; it was given up") from error

    def quarantine(self, group_id: bytes) -> bool:
        """A reader found a held group damaged: give it up if it is, and say so. False: the bytes here are intact."""
        self.locate(group_id)
        try:
            self.read(group_id)
        except ReplayBufferError:
            return True
        return False

    def held_entries(self) -> list[Entry]:
        """Every held group, leased ones too, with its uses so far: what a snapshot holds. pin() keeps the files."""
        return [replace(held.entry, uses=held.uses) for held in self._held.values()]

    def path_of(self, segment: int) -> str:
        """Where a segment's file is now. Also for other threads, for segments that are pinned."""
        return self._segments[segment].path

    def pin(self, entries: Iterable[Entry]) -> None:
        """Keep the segments of these groups until unpin, whatever becomes of the groups."""
        for entry in entries:
            self._segments[entry.segment].num_live += 1

    def unpin(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._segments.drop(entry.segment)

    # Leases

    def advance(self, policy_version: int) -> None:
        """The newest policy version from now on; it only grows. Groups that claim a later one are refused."""
        if self.policy_version is None or policy_version > self.policy_version:
            self._log.write(pack_event(Kind.VERSION, number=policy_version))
            self.policy_version = policy_version

    def evict(self, *, policy_version: int, max_staleness: int) -> list[GroupRef]:
        """Drop free groups with policy_version - min_version > max_staleness; they are counted and returned."""
        self.advance(policy_version)
        self.expire_leases()
        stale = self._free.older_than(policy_version - max_staleness)
        if stale:
            self._log.write(b"".join(pack_event(Kind.EVICT, group_id=ref.group_id) for ref in stale))
        for ref in stale:
            self._evict(ref.group_id)
        return stale

    def offer(
        self, num_groups: int, *, policy_version: int, max_staleness: int, sampling: Sampling = FIFO, draw: str = ""
    ) -> list[Offer]:
        """The first usable free groups in the order of `sampling`, at most num_groups, after evicting the stale."""
        self.evict(policy_version=policy_version, max_staleness=max_staleness)
        return self._free.first(num_groups, sampling, draw=draw)

    def lease(
        self,
        lease_id: bytes,
        group_ids: Sequence[bytes],
        *,
        policy_version: int,
        max_staleness: int,
        timeout_s: float = MAX_LEASE_S,
    ) -> bool:
        """Hand out exactly these groups, or none (False) when one is not free or too stale. It may be repeated.

        Without a renewal for timeout_s they are free again.
        """
        self.advance(policy_version)
        self.expire_leases()
        if lease_id in self._leases:
            return set(self._leases[lease_id]) == set(group_ids)
        wanted = [self._held.get(group_id) for group_id in group_ids]
        for held in wanted:
            if held is None or held.lease != NO_ID or policy_version - held.ref.min_version > max_staleness:
                return False
        if len(set(group_ids)) != len(group_ids):
            return False
        number = int(min(timeout_s, MAX_LEASE_S) * 1e3)
        self._log.write(b"".join(pack_event(Kind.LEASE, group_id=i, owner=lease_id, number=number) for i in group_ids))
        for group_id in group_ids:
            self._lease(group_id, lease_id, number / 1e3)
        return True

    def renew(self, lease_id: bytes) -> bool:
        """The holder lives: count its timeout from now. False for a lease that is not known (any more)."""
        if lease_id not in self._leases:
            return False
        _, timeout_s = self._deadlines[lease_id]
        self._deadlines[lease_id] = (self._now() + timeout_s, timeout_s)
        return True

    def commit(self, lease_id: bytes, group_ids: Sequence[bytes], *, max_uses: int = 1) -> int:
        """The groups of a lease were trained on; how many are counted now (0 for a repetition).

        After max_uses they are gone, before that free again. Groups whose lease ran out meanwhile are committed too.
        Raises ReplayBufferError, after committing the rest, when one was handed out again by then: it is trained on
        more often than allowed.
        """
        conflicts, records, counted = [], [], []
        for group_id in group_ids:
            held = self._held.get(group_id)
            if held is None:
                if self._gone.get(group_id, NO_ID) not in (NO_ID, lease_id):
                    conflicts.append(group_id)
            elif held.lease not in (lease_id, NO_ID):
                conflicts.append(group_id)
            elif held.last_use != lease_id:
                last = held.uses + 1 >= max_uses
                kind = Kind.COMMIT if last else Kind.USED
                records.append(pack_event(kind, group_id=group_id, owner=lease_id, number=held.uses + 1))
                counted.append((group_id, last))
        if records:
            self._log.write(b"".join(records))
        for group_id, last in counted:
            self._commit(group_id, lease_id) if last else self._use(group_id, lease_id)
        self._end_if_empty(lease_id)
        if conflicts:
            raise ReplayBufferError(
                f"lease {lease_id.hex()} ran out before its commit, and {len(conflicts)} of its groups were handed out "
                f"again: {', '.join(i.hex() for i in conflicts[:4])}; give leases a longer timeout"
            )
        return len(counted)

    def release(self, lease_id: bytes) -> int:
        """Make the groups of a lease free again; how many. 0 for an unknown lease: repeating it is harmless."""
        group_ids = list(self._leases.get(lease_id, ()))
        if group_ids:
            self._log.write(b"".join(pack_event(Kind.RELEASE, group_id=i) for i in group_ids))
        for group_id in group_ids:
            self._release(group_id)
        self._end_if_empty(lease_id)
        return len(group_ids)

    def expire_leases(self) -> int:
        """Release the leases whose holders have not renewed them in time; how many."""
        now = self._now()
        expired = [lease_id for lease_id, (deadline, _) in self._deadlines.items() if deadline < now]
        for lease_id in expired:
            self.release(lease_id)
        return len(expired)

    def stats(self) -> BufferStats:
        return BufferStats(
            groups=len(self._free),
            rows=self._free.rows,
            tokens=self._free.tokens,
            bytes=self._free.bytes,
            leased_groups=len(self._held) - len(self._free),
            leased_bytes=self._leased_bytes,
            held_bytes=self.held_bytes,
            **self._totals,
        )

    @property
    def group_bytes(self) -> int:
        """Bytes of all groups, leased ones included."""
        return self._free.bytes + self._leased_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all segments, empty ones that wait for their next use included."""
        return self._segments.bytes_in_use + self._segments.recycled_bytes

    def compact_if_long(self) -> None:
        """Shorten the log when most of it is likely history; with `keep` the history is what is kept."""
        if self._log.is_long and not self._keep:
            self._log.compact(self._records())

    def close(self) -> None:
        """Seal what nobody writes to any more and close all files. The contents stay in the directory."""
        self._seal_own()
        self.seal_dead_writers()
        self._writer.close()
        self._reader.close()
        self._log.close()

    def _seal_own(self) -> None:
        for segment in self._segments.open_segments():
            if segment.writer == _SELF:
                self._segments.seal(segment)

    # What the records mean

    def _apply(self, record: Record) -> None:
        """Repeat a logged change."""
        entry, group_id, number = record.entry, record.entry.ref.group_id, record.entry.ref.number
        match record.kind:
            case Kind.APPEND:
                self._add(entry)
                self._totals["appended"] += 1
            case Kind.LEASE:
                self._lease(group_id, record.owner, number / 1e3)
            case Kind.RELEASE:
                self._release(group_id)
            case Kind.COMMIT:
                self._commit(group_id, record.owner)
            case Kind.USED:
                self._use(group_id, record.owner)
            case Kind.EVICT:
                self._evict(group_id)
            case Kind.QUARANTINE:
                self._quarantine(group_id)
            case Kind.GRANT:
                self._segments.granted(entry.segment, record.owner, number)
            case Kind.BLOCK:
                self._segments.note_block(entry)
            case Kind.SEAL:
                self._segments[entry.segment].writer = NO_ID
            case Kind.SPILL:
                self._segments[entry.segment].writer, self._segments[entry.segment].spilled = NO_ID, True
            case Kind.VERSION:
                self.policy_version = number
            case Kind.TOTAL:
                name = TOTALS[entry.segment]
                value = struct.unpack("<d", struct.pack("<q", number))[0]
                self._totals[name] = value if name.endswith("reward") else int(value)
            case Kind.GONE:
                self._gone[group_id] = record.owner

    def _records(self) -> Iterator[bytes]:
        """The shortest log that leads to this state."""
        if self.policy_version is not None:
            yield pack_event(Kind.VERSION, number=self.policy_version)
        yield from (pack_event(Kind.GONE, group_id=i, owner=lease) for i, lease in self._gone.items())
        yield from self._segments.records()
        for group_id, held in self._held.items():
            yield pack_entry(held.entry)
            for _ in range(held.uses - held.entry.uses):
                yield pack_event(Kind.USED, group_id=group_id, owner=held.last_use)
            if held.lease != NO_ID:
                number = int(self._deadlines[held.lease][1] * 1e3)
                yield pack_event(Kind.LEASE, group_id=group_id, owner=held.lease, number=number)
        yield from self._segments.seals()
        for index, name in enumerate(TOTALS):
            bits = struct.unpack("<q", struct.pack("<d", float(self._totals[name])))[0]
            yield pack_event(Kind.TOTAL, segment=index, number=bits)

    def _check(self, entry: Entry, writer: bytes) -> None:
        ref = entry.ref
        if self.policy_version is not None and ref.max_version > self.policy_version:
            raise ReplayBufferError(
                f"group {ref.number} has tokens of policy version {ref.max_version}; "
                f"the newest is {self.policy_version}"
            )
        self._verify(entry, self._segments.check(entry, writer).path)

    def _verify(self, entry: Entry, path: str) -> bytes:
        ref = entry.ref
        data = self._reader.read(path, entry.offset, ref.nbytes)
        found = xxhash.xxh3_64_intdigest(data)
        if found != entry.checksum:
            raise ReplayBufferError(
                f"group {ref.number} ({ref.group_id.hex()}) is corrupted in {path} at byte {entry.offset}: "
                f"xxh3 checksum {found:016x}, recorded {entry.checksum:016x}"
            )
        return data

    def _add(self, entry: Entry) -> None:
        self._held[entry.ref.group_id] = Held(entry, uses=entry.uses)
        self._segments.add(entry)
        self._free.add(entry.ref)

    def _lease(self, group_id: bytes, lease_id: bytes, timeout_s: float) -> None:
        held = self._held[group_id]
        self._free.remove(held.ref)
        held.lease = lease_id
        self._leased_bytes += held.ref.nbytes
        self._leases.setdefault(lease_id, {})[group_id] = None
        self._deadlines[lease_id] = (self._now() + timeout_s, timeout_s)

    def _release(self, group_id: bytes) -> None:
        held = self._held[group_id]
        self._end_lease(held)
        self._free.add(held.ref)

    def _use(self, group_id: bytes, lease_id: bytes) -> None:
        held = self._held[group_id]
        held.uses += 1
        held.last_use = lease_id
        self._totals["uses"] += 1
        if held.lease != NO_ID:
            self._release(group_id)

    def _commit(self, group_id: bytes, lease_id: bytes) -> None:
        self._totals["uses"] += 1
        self._drop(group_id, lease_id, "committed")

    def _evict(self, group_id: bytes) -> None:
        self._drop(group_id, NO_ID, "evicted")

    def _quarantine(self, group_id: bytes) -> None:
        self._take_out(group_id, NO_ID)
        self._totals["quarantined"] += 1

    def _drop(self, group_id: bytes, lease_id: bytes, fate: str) -> None:
        held = self._take_out(group_id, lease_id)
        self._segments.drop(held.entry.segment)
        ref = held.ref
        self._totals[fate] += 1
        self._totals[f"{fate}_rows"] += ref.num_rows
        self._totals[f"{fate}_tokens"] += ref.num_tokens
        if not math.isnan(ref.reward_mean):
            self._totals[f"{fate}_reward"] += ref.reward_mean

    def _take_out(self, group_id: bytes, lease_id: bytes) -> Held:
        """The group, free or leased, is held no more, but remembered."""
        held = self._held.pop(group_id)
        if held.lease == NO_ID:
            self._free.remove(held.ref)
        else:
            self._end_lease(held)
        self._gone[group_id] = lease_id
        if len(self._gone) > NUM_REMEMBERED_IDS:
            del self._gone[next(iter(self._gone))]
        return held

    def _end_lease(self, held: Held) -> None:
        self._leases[held.lease].pop(held.ref.group_id, None)
        self._end_if_empty(held.lease)
        held.lease = NO_ID
        self._leased_bytes -= held.ref.nbytes

    def _end_if_empty(self, lease_id: bytes) -> None:
        if not self._leases.get(lease_id):
            self._leases.pop(lease_id, None)
            self._deadlines.pop(lease_id, None)


def check_files(directory: Path, settings: StoreSettings) -> None:
    """Raises ReplayBufferError when another version of asyncrl wrote the shard in this directory; changes nothing."""
    check_log(directory / LOG)
    for folder in (directory, settings.spill_dir):
        for path in () if folder is None else segment_files(folder):
            version = schema_version_of(path)
            if version not in (None, SCHEMA_VERSION):
                raise ReplayBufferError(
                    f"the buffer shard in {directory} is not continued: {path} has trajectory schema version "
                    f"{version}, this asyncrl reads version {SCHEMA_VERSION}; read it with the asyncrl that wrote it, "
                    f"or start in an empty folder"
                )
