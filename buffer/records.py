"""Index entries and log records of a shard: fixed-size binary, the same bytes in memory, on ZMQ and in the log.

Every record ends with the xxh3 of what precedes it, so that a torn write at the end of a log is recognised.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

import xxhash

from asyncrl.errors import ReplayBufferError
from asyncrl.types import GroupRef

NO_ID = bytes(16)
_ENTRY = struct.Struct("<B3xIQQIIQ16s16sqIIQiidd")
_ZEROS = (0, 0, NO_ID, NO_ID, 0, 0, 0, 0, 0, 0, 0.0, 0.0)  # what follows metadata_length
_CHECK = struct.Struct("<Q")
RECORD_BYTES = _ENTRY.size + _CHECK.size


class Kind(IntEnum):
    """What happened. Fields that a kind does not need are zero."""

    APPEND = 1  # an entry
    LEASE = 2  # group_id goes to the lease `owner`, which lasts `number` milliseconds without a renewal
    RELEASE = 3  # group_id is free again
    COMMIT = 4  # group_id was trained on for the last time, under the lease `owner`
    EVICT = 5  # group_id aged out
    QUARANTINE = 6  # group_id failed its checksum
    GRANT = 7  # segment belongs to the writer `owner` until sealed
    SEAL = 8  # no more groups go into segment
    SPILL = 9  # segment moved to disk
    VERSION = 10  # number is the policy version from now on
    TOTAL = 11  # number (the bits of a double) is the value of the counter with index `segment`
    USED = 12  # group_id was trained on `number` times so far and is free again
    GONE = 13  # group_id was here once: a repeated append of it is ignored
    BLOCK = 14  # a message of a segment that is not sealed; its group may be gone


_KINDS = {int(kind): kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a group lies and what is known without reading it.

    Attributes:
        ref: its index entry; the shard is the reader's business and 0 here.
        segment: number of the segment in its shard.
        offset: of the Arrow message in the segment file, in bytes; its length is ref.nbytes.
        metadata_length: bytes of the message before its body, as an Arrow file's footer records it.
        checksum: xxh3_64 of the message, made by the writer.
        uses: how often the group was trained on before it came here, from a snapshot.
        packed: the record that it came in, so that it is not packed again.
    """

    ref: GroupRef
    segment: int
    offset: int
    metadata_length: int
    checksum: int
    uses: int = 0
    packed: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a shard's log."""

    kind: Kind
    entry: Entry
    owner: bytes = NO_ID


def pack_entry(entry: Entry) -> bytes:
    """The bytes of the record that this entry was appended."""
    if entry.packed:
        return entry.packed
    ref = entry.ref
    data = _ENTRY.pack(
        Kind.APPEND,
        entry.segment,
        entry.offset,
        ref.nbytes,
        entry.metadata_length,
        ref.num_rows,
        entry.checksum,
        ref.group_id,
        NO_ID,
        ref.number,
        ref.max_tokens,
        entry.uses,
        ref.num_tokens,
        ref.min_version,
        ref.max_version,
        ref.reward_mean,
        ref.reward_std,
    )
    return data + _CHECK.pack(xxhash.xxh3_64_intdigest(data))


def pack_event(
    kind: Kind, *, group_id: bytes = NO_ID, owner: bytes = NO_ID, segment: int = 0, number: int = 0
) -> bytes:
    """The bytes of a record that is not about a new entry."""
    data = _ENTRY.pack(kind, segment, 0, 0, 0, 0, 0, group_id, owner, number, 0, 0, 0, 0, 0, 0.0, 0.0)
    return data + _CHECK.pack(xxhash.xxh3_64_intdigest(data))


def pack_block(segment: int, block: tuple[int, int, int]) -> bytes:
    """The bytes of a record about one message: (offset, metadata bytes, body bytes)."""
    offset, metadata, body = block
    data = _ENTRY.pack(Kind.BLOCK, segment, offset, metadata + body, metadata, *_ZEROS)
    return data + _CHECK.pack(xxhash.xxh3_64_intdigest(data))


def is_intact(data: bytes | memoryview) -> bool:
    """Whether these RECORD_BYTES are what was packed."""
    return xxhash.xxh3_64_intdigest(data[: _ENTRY.size]) == _CHECK.unpack_from(data, _ENTRY.size)[0]


def unpack_record(data: bytes | memoryview, shard: int = 0) -> Record:
    """Inverse of pack_entry and pack_event. Raises ReplayBufferError for anything else."""
    if len(data) != RECORD_BYTES:
        raise ReplayBufferError(f"a buffer record has {RECORD_BYTES} bytes; got {len(data)}")
    if not is_intact(data):
        raise ReplayBufferError("a buffer record is damaged: its checksum does not match")
    (
        kind,
        segment,
        offset,
        nbytes,
        metadata_length,
        num_rows,
        checksum,
        group_id,
        owner,
        number,
        max_tokens,
        uses,
        num_tokens,
        min_version,
        max_version,
        reward_mean,
        reward_std,
    ) = _ENTRY.unpack_from(data)
    known = _KINDS.get(kind)
    if known is None:
        raise ReplayBufferError(f"a buffer record of unknown kind {kind}: written by another asyncrl?")
    ref = GroupRef(
        shard=shard,
        group_id=group_id,
        number=number,
        num_rows=num_rows,
        num_tokens=num_tokens,
        max_tokens=max_tokens,
        min_version=min_version,
        max_version=max_version,
        nbytes=nbytes,
        reward_mean=reward_mean,
        reward_std=reward_std,
    )
    packed = bytes(data) if known is Kind.APPEND else b""
    return Record(known, Entry(ref, segment, offset, metadata_length, checksum, uses, packed), owner)


def unpack_records(data: bytes | memoryview, shard: int = 0) -> Iterator[Record]:
    """All records of a frame or a log. Raises ReplayBufferError at the first that is torn or incomplete."""
    view = memoryview(data)
    for start in range(0, len(view), RECORD_BYTES):
        yield unpack_record(view[start : start + RECORD_BYTES], shard)
