"""The log of one shard: what happened to its groups, in order, so that a new process continues where a killed one was.

A record that was not written whole ends the log: what it stood for was never acknowledged; so does room that was
allocated ahead. Compaction replaces the file by the records that lead to the present state, under a temporary name and
a rename, so that either one is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from asyncrl.buffer.records import RECORD_BYTES, Record, is_intact, unpack_record
from asyncrl.buffer.segments import pwrite_all
from asyncrl.errors import ReplayBufferError

LOG = "log"
"""Its name in the shard's folder."""
COMPACT_FROM = 1 << 14
"""A log shorter than this many records is never compacted."""
RESERVE_BYTES = 1 << 18
"""Room for 2,048 records, set aside after the end as zeros."""


class ShardLog:
    """Appends records to a file; read() gives those of an earlier process. Used by one thread."""

    def __init__(self, path: Path, *, sync: bool) -> None:
        self._path = path
        self._sync = sync
        self._fd = self._open(path)
        self._end = self._allocated = os.fstat(self._fd).st_size
        self._compacted = 0

    @property
    def num_records(self) -> int:
        return self._end // RECORD_BYTES

    @property
    def is_long(self) -> bool:
        """Whether most of the log is likely history that no longer matters."""
        return self.num_records > max(COMPACT_FROM, 4 * self._compacted)

    def read(self) -> Iterator[Record]:
        """The records so far; a torn end is cut off. Raises ReplayBufferError when one in the middle is damaged."""
        whole = _whole_records(_written(os.pread(self._fd, self._end, 0)))
        yield from _unpack(whole, self._path)
        self._end = self._allocated = len(whole) * RECORD_BYTES
        os.ftruncate(self._fd, self._end)

    def write(self, records: bytes, *, grows: bool = False) -> None:
        """Append whole records. Raises ReplayBufferError, with the log as before, when there is no room.

        Args:
            grows: they add groups or segments. RESERVE_BYTES are kept from these, so that on a full disk what is there
                can still be leased, committed and evicted.
        """
        try:
            self._allocate(self._end + len(records) + RESERVE_BYTES)
        except OSError as error:
            if grows:
                raise ReplayBufferError(f"the buffer's log {self._path} has no room: {error.strerror}") from error
        try:
            pwrite_all(self._fd, records, self._end)
            if self._sync:
                os.fdatasync(self._fd)
        except (ReplayBufferError, OSError) as error:
            os.ftruncate(self._fd, self._end)  # the first records of several may be there, whole
            self._allocated = self._end
            raise ReplayBufferError(f"the buffer's log {self._path} cannot be written: {error}") from error
        self._end += len(records)

    def compact(self, records: Iterable[bytes]) -> None:
        """Replace the whole log by these records."""
        data = b"".join(records)
        temporary = self._path.with_name(self._path.name + ".new")
        temporary.unlink(missing_ok=True)
        fd = self._open(temporary)
        try:
            pwrite_all(fd, data, 0)
            if self._sync:
                os.fsync(fd)
            temporary.replace(self._path)
        except BaseException:
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise
        os.close(self._fd)
        self._fd, self._compacted = fd, len(data) // RECORD_BYTES
        self._end = self._allocated = len(data)

    def close(self) -> None:
        os.ftruncate(self._fd, self._end)
        os.close(self._fd)

    def _allocate(self, num_bytes: int) -> None:
        if num_bytes > self._allocated:
            os.posix_fallocate(self._fd, self._allocated, num_bytes + RESERVE_BYTES - self._allocated)
            self._allocated = num_bytes + RESERVE_BYTES

    @staticmethod
    def _open(path: Path) -> int:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ReplayBufferError(f"the buffer's log {path} cannot be opened: {error.strerror}") from error


def read_log(path: Path) -> tuple[list[Record], int]:
    """The records of a log, and the bytes of a torn end after them, without changing it.

    Raises ReplayBufferError when it cannot be read or a record before the end is damaged.
    """
    try:
        data = _written(path.read_bytes())
    except OSError as error:
        raise ReplayBufferError(f"the buffer's log {path} cannot be read: {error.strerror}") from error
    whole = _whole_records(data)
    return list(_unpack(whole, path)), len(data) - len(whole) * RECORD_BYTES


def check_log(path: Path) -> None:
    """Raises ReplayBufferError when a log that is not empty has no intact record: to cut its end off would empty it."""
    data = _written(path.read_bytes()) if path.exists() else b""
    if len(data) >= RECORD_BYTES and not _whole_records(data):
        raise ReplayBufferError(
            f"the buffer's log {path} has no record that this asyncrl can read: another version of asyncrl wrote it, "
            f"or it is damaged; read the folder with the asyncrl that wrote it, or start in an empty one"
        )


def _written(data: bytes) -> bytes:
    """Without the zeros of the reserve."""
    return data[: -(-len(data.rstrip(b"\0")) // RECORD_BYTES) * RECORD_BYTES]


def _whole_records(data: bytes) -> list[memoryview]:
    """All records up to the last intact one."""
    view = memoryview(data)
    whole = [view[at : at + RECORD_BYTES] for at in range(0, len(view) - RECORD_BYTES + 1, RECORD_BYTES)]
    while whole and not is_intact(whole[-1]):
        whole.pop()
    return whole


def _unpack(records: Iterable[memoryview], path: Path) -> Iterator[Record]:
    for index, record in enumerate(records):
        try:
            yield unpack_record(record)
        except ReplayBufferError as error:
            raise ReplayBufferError(f"{path}, record {index}: {error}") from error
