"""Segment files: Arrow messages one after the other, closed by the footer that makes the file an Arrow IPC file.

    "ARROW1\\0\\0" | schema message | record batch message per group ... | end of stream | footer | "ARROW1"

A writer owns the segment that it was granted and appends to it with pwrite; nobody else writes there until it is
sealed. On one host the file lies in shared memory, so that only the index entry crosses a socket and a reader copies
the message straight out of the file; pread and pwrite run at memory speed there and, unlike mapped memory, turn a
full or vanished file into an error instead of a signal. A sealed file is read by any Arrow tool.

Source: Arrow columnar format, "IPC File Format"; format/File.fbs (Footer, Block).
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from asyncrl.buffer.schema import SCHEMA, VERSION_KEY, check_schema
from asyncrl.errors import ReplayBufferError

SEALED, OPEN = ".arrow", ".open"
IDENTITY, WRITERS = "identity", "writers"
"""Beside the segments: what a client recognises the shard by, and the folder of the writers' locks."""
_MAGIC = b"ARROW1"
_SCHEMA_OFFSET = 8  # after the magic and its padding
_ALIGNMENT = 64
_BLOCK = struct.Struct("<qi4xq")  # Block: offset, metaDataLength, bodyLength
_RECORD_BATCHES_FIELD = 3  # of Footer
NUM_OPEN_FILES = 64
_EMPTY = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in SCHEMA], schema=SCHEMA)


def _written_by_arrow(num_batches: int) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA) as writer:
        for _ in range(num_batches):
            writer.write_batch(_EMPTY)
    return sink.getvalue().to_pybytes()


def _footer_of(file: bytes) -> bytes:
    (size,) = struct.unpack_from("<i", file, len(file) - len(_MAGIC) - 4)
    return file[len(file) - len(_MAGIC) - 4 - size : len(file) - len(_MAGIC) - 4]


def _vector_of_blocks(footer: bytes) -> int:
    """Position of the first Block of Footer.recordBatches (flatbuffers: root table -> vtable -> field -> vector)."""
    (table,) = struct.unpack_from("<I", footer, 0)
    (to_vtable,) = struct.unpack_from("<i", footer, table)
    (field,) = struct.unpack_from("<H", footer, table - to_vtable + 4 + 2 * _RECORD_BATCHES_FIELD)
    (to_vector,) = struct.unpack_from("<I", footer, table + field)
    return table + field + to_vector + 4


@lru_cache(maxsize=512)
def _footer_template(num_batches: int) -> tuple[bytes, int]:
    footer = _footer_of(_written_by_arrow(num_batches))
    return footer, _vector_of_blocks(footer) if num_batches else 0


def _schema_prefix() -> bytes:
    """Everything before the first record batch: pyarrow's own bytes."""
    with_one = _written_by_arrow(1)
    footer = _footer_of(with_one)
    return with_one[: _BLOCK.unpack_from(footer, _vector_of_blocks(footer))[0]]


def tail(blocks: Sequence[tuple[int, int, int]]) -> bytes:
    """What follows the last message: end of stream, footer, its size, magic. Blocks: (offset, metadata, body) bytes."""
    template, position = _footer_template(len(blocks))
    footer = bytearray(template)
    for i, block in enumerate(blocks):
        _BLOCK.pack_into(footer, position + i * _BLOCK.size, *block)
    return b"\xff\xff\xff\xff\0\0\0\0" + bytes(footer) + struct.pack("<i", len(footer)) + _MAGIC


def blocks_of(path: str | os.PathLike[str]) -> list[tuple[int, int, int]]:
    """The messages that a sealed file's footer lists, as (offset, metadata, body) bytes: the inverse of tail().

    Raises ReplayBufferError when the file is truncated, is no Arrow file or has another schema than this asyncrl.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if os.pread(file.fileno(), len(_MAGIC), 0) != _MAGIC:
                raise ReplayBufferError(f"{path} is a foreign file: it does not begin as an Arrow file")
            check_segment_schema(path)
            end = os.pread(file.fileno(), len(_MAGIC) + 4, max(0, size - len(_MAGIC) - 4))
            length = struct.unpack_from("<i", end)[0]
            if not end.endswith(_MAGIC) or not 0 < length <= size - len(PREFIX):
                raise ReplayBufferError(f"{path} is truncated: it does not end with the footer of an Arrow file")
            blocks = _blocks_in(os.pread(file.fileno(), length, size - len(end) - length))
            for offset, metadata, body in blocks:
                if min(metadata, body) < 0 or not len(_MAGIC) < offset <= size - metadata - body:
                    raise ReplayBufferError(f"{path} is damaged: its footer lists bytes that the file does not have")
            _check_with_arrow(path, len(blocks))
            return blocks
    except (OSError, struct.error) as error:
        raise ReplayBufferError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _check_with_arrow(path: str | os.PathLike[str], num_blocks: int) -> None:
    """That any other reader finds the same in the file."""
    try:
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            check_schema(reader.schema, what=f"{path}, footer")
            if reader.num_record_batches != num_blocks:
                raise ReplayBufferError(f"{path} is damaged: its footer contradicts itself")
    except (pa.ArrowException, ValueError) as error:
        raise ReplayBufferError(f"{path} is damaged: its footer cannot be read: {error}") from error


def _blocks_in(footer: bytes) -> list[tuple[int, int, int]]:
    (table,) = struct.unpack_from("<I", footer, 0)
    (to_vtable,) = struct.unpack_from("<i", footer, table)
    (vtable_size,) = struct.unpack_from("<H", footer, table - to_vtable)
    if vtable_size <= 4 + 2 * _RECORD_BATCHES_FIELD:
        return []  # a field at the end of a table that has its default is left out
    first = _vector_of_blocks(footer)
    (num,) = struct.unpack_from("<I", footer, first - 4)
    return [_BLOCK.unpack_from(footer, first + i * _BLOCK.size) for i in range(num)]


def check_segment_schema(path: str | os.PathLike[str]) -> None:
    """Raises ReplayBufferError when a file begins with another schema than this asyncrl's. A file whose beginning is no
    schema at all passes: its groups are checked one by one."""
    schema = _schema_at_start(path)
    try:
        if schema is not None:
            check_schema(schema, what=str(path))
    except UnicodeDecodeError as error:
        raise ReplayBufferError(f"{path} is damaged: the names in its schema are no text") from error


def schema_version_of(path: str | os.PathLike[str]) -> int | None:
    """Of the trajectory schema that a file begins with, when it is not this asyncrl's byte for byte; None: it is, or
    there is no such schema."""
    schema = _schema_at_start(path)
    version = (schema.metadata or {}).get(VERSION_KEY, b"") if schema is not None else b""
    return int(version) if version.isdigit() else None


def _schema_at_start(path: str | os.PathLike[str]) -> pa.Schema | None:
    """None: it is this asyncrl's, byte for byte, or cannot be read."""
    with open(path, "rb") as file:
        start = file.read(len(PREFIX))
        if start == PREFIX or not start.startswith(_MAGIC):
            return None
        start += file.read(1 << 16)
    try:
        return pa.ipc.read_schema(pa.py_buffer(start[_SCHEMA_OFFSET:]))
    except (pa.ArrowException, OSError, ValueError, EOFError):
        return None


def metadata_length(message: Any) -> int:
    """Bytes of an encapsulated message before its body: the continuation marker, the size and the metadata."""
    marker, size = struct.unpack_from("<Ii", message, 0)
    if marker != 0xFFFFFFFF or size <= 0 or size + 8 > len(message):
        raise ReplayBufferError("a stored group is not an Arrow record batch message")
    return size + 8


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


PREFIX = _schema_prefix().ljust(aligned(len(_schema_prefix())), b"\0")
"""Start of every segment; padded, since the footer says where each batch begins."""


def segment_path(directory: str | os.PathLike[str], number: int, *, sealed: bool) -> str:
    return os.path.join(directory, f"{number:08d}{SEALED if sealed else OPEN}")


def pwrite_all(fd: int, data: Any, offset: int) -> None:
    """Write all bytes. Raises ReplayBufferError when the disk or shared memory is full."""
    view = memoryview(data).cast("B")
    try:
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written
    except OSError as error:
        raise ReplayBufferError(f"{_path_of(fd)} cannot be written: {error.strerror}") from error


def _path_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return "a file of the buffer"


def open_segment(path: str, recycled: str | None = None) -> None:
    """Create a segment file, from the pages of a recycled one if there is any: fresh memory is far slower."""
    try:
        if recycled is not None:
            os.rename(recycled, path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ReplayBufferError(f"a buffer segment cannot be created at {path}: {error.strerror}") from error
    try:
        pwrite_all(fd, PREFIX, 0)
    finally:
        os.close(fd)


def seal_segment(path: str, used: int, blocks: Sequence[tuple[int, int, int]], *, sync: bool) -> str:
    """Write the footer after the last message, cut the file there and give it its final name, which is returned."""
    sealed = path.removesuffix(OPEN) + SEALED
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        end = tail(blocks)
        pwrite_all(fd, end, used)
        os.ftruncate(fd, used + len(end))
        if sync:
            os.fdatasync(fd)
        os.rename(path, sealed)
    finally:
        os.close(fd)
    return sealed


class SegmentWriter:
    """Appends messages to the segment that was granted last."""

    def __init__(self) -> None:
        self._fd = -1
        self.number = -1
        self._offset = 0
        self._end = 0

    def start(self, number: int, path: str, num_bytes: int) -> None:
        """Go on in another segment of that many bytes."""
        self.close()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ReplayBufferError(f"buffer segment {path} cannot be opened: {error.strerror}") from error
        self.number, self._offset, self._end = number, len(PREFIX), num_bytes

    def write(self, message: Any, *, or_fail: bool = False) -> int | None:
        """Offset of the message; None when neither the segment nor the disk has room for it.

        Raises ReplayBufferError instead, with or_fail, when the disk has none.
        """
        offset = self._offset
        if self._fd < 0 or offset + aligned(len(message)) > self._end:
            return None
        try:
            pwrite_all(self._fd, message, offset)
        except ReplayBufferError:
            self._end = 0
            if or_fail:
                raise
            return None
        self._offset += aligned(len(message))
        return offset

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = self.number = -1


class SegmentReader:
    """Copies messages out of segment files, whose descriptors it keeps."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, int] = OrderedDict()

    def read(self, path: str, offset: int, num_bytes: int) -> bytes:
        """A private copy: whatever happens to the segment afterwards, these bytes stay."""
        try:
            data = os.pread(self._file(path), num_bytes, offset)
        except OSError as error:
            raise ReplayBufferError(f"buffer segment {path} cannot be read: {error.strerror}") from error
        if len(data) != num_bytes:
            raise ReplayBufferError(f"buffer segment {path} is truncated: {len(data)} of {num_bytes} bytes at {offset}")
        return data

    def sync(self, path: str) -> None:
        """Return when everything written to the file, by whomever, is on disk."""
        os.fdatasync(self._file(path))

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _file(self, path: str) -> int:
        fd = self._files.get(path)
        if fd is None:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ReplayBufferError(f"buffer segment {path} cannot be opened: {error.strerror}") from error
            self._close_removed()
            self._files[path] = fd
            if len(self._files) > NUM_OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
        else:
            self._files.move_to_end(path)
        return fd

    def _close_removed(self) -> None:
        """Files that were removed: their memory is free only when nobody has them open."""
        for path in [path for path, fd in self._files.items() if not os.fstat(fd).st_nlink]:
            os.close(self._files.pop(path))


class WriterLock:
    """A file that its writer holds locked as long as it lives: the kernel lets go when the process dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)

    @staticmethod
    def is_held(path: Path) -> bool:
        """Whether the writer of this lock still lives."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False
