"""Arrow IPC record batch messages of one schema, put together and taken apart without Arrow objects.

    0xFFFFFFFF | metadata size | metadata: a flatbuffer | body: the columns' buffers, each from a multiple of 8 bytes on

With a fixed schema the metadata always has the same bytes but for the number of rows, the size of the body, and the
tables of nodes (rows and nulls of each array) and buffers (offset and length). They are patched in pyarrow's own bytes.

Source: Arrow columnar format, "Encapsulated message format"; format/Message.fbs (Message, RecordBatch).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from asyncrl.errors import ReplayBufferError

_MESSAGE_HEADER, _MESSAGE_BODY_LENGTH = 2, 3  # fields of Message; 1 is the type of the header
_LENGTH, _NODES, _BUFFERS, _COMPRESSION = 0, 1, 2, 3  # fields of RecordBatch
_PREFIX = 8  # continuation marker and metadata size
_PADDING = [bytes(n) for n in range(8)]
_PAIR = struct.Struct("<qq")  # FieldNode: length, null_count; Buffer: offset, length


def find_field(flatbuffer: Any, table: int, index: int) -> int:
    """Position of a table's field, 0 when it is not there: it has its default then."""
    (to_vtable,) = struct.unpack_from("<i", flatbuffer, table)
    vtable = table - to_vtable
    (vtable_bytes,) = struct.unpack_from("<H", flatbuffer, vtable)
    at = 4 + 2 * index
    (offset,) = struct.unpack_from("<H", flatbuffer, vtable + at) if at < vtable_bytes else (0,)
    return table + offset if offset else 0


def follow(flatbuffer: Any, position: int) -> int:
    """Where the reference at this position leads."""
    return position + struct.unpack_from("<I", flatbuffer, position)[0]


def _find_vectors(message: Any) -> tuple[int, int, int, int, int]:
    """Positions of the body's length, the number of rows, the first node and the first buffer; metadata bytes."""
    marker, size = struct.unpack_from("<Ii", message, 0)
    if marker != 0xFFFFFFFF or size <= 0:
        raise ValueError("no Arrow message")
    root = follow(message, _PREFIX)
    batch = follow(message, find_field(message, root, _MESSAGE_HEADER))
    if find_field(message, batch, _COMPRESSION):
        raise ValueError("a compressed Arrow message")
    nodes, buffers = (follow(message, find_field(message, batch, field)) + 4 for field in (_NODES, _BUFFERS))
    return find_field(message, root, _MESSAGE_BODY_LENGTH), find_field(message, batch, _LENGTH), nodes, buffers, size


class MessageLayout:
    """How the record batch messages of `schema` are laid out.

    Attributes:
        num_nodes, num_buffers: arrays and buffers of a message, nested ones included, in the order of the schema.
        first_node, first_buffer: of each column; its validity bitmap is the first buffer.
    """

    def __init__(self, schema: pa.Schema) -> None:
        one_row = pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in schema], schema=schema)
        message = one_row.serialize().to_pybytes()
        self.body_length, self.length, self.nodes, self.buffers, size = _find_vectors(message)
        self.template = message[: _PREFIX + size]
        self.first_node: dict[str, int] = {}
        self.first_buffer: dict[str, int] = {}
        self.num_nodes = self.num_buffers = 0
        for field in schema:
            self.first_node[field.name], self.first_buffer[field.name] = self.num_nodes, self.num_buffers
            self._count(field.type)
        self._pack_nodes = struct.Struct(f"<{2 * self.num_nodes}q")
        self._pack_buffers = struct.Struct(f"<{2 * self.num_buffers}q")

    def _count(self, kind: pa.DataType) -> None:
        self.num_nodes += 1
        self.num_buffers += kind.num_buffers
        for i in range(kind.num_fields):
            self._count(kind.field(i).type)

    def unpack(self, message: Any) -> MessageView:
        """Inverse of pack. Raises ValueError or struct.error for what is no message of this schema."""
        _, length, nodes, buffers, size = _find_vectors(message)
        for vector, expected in ((nodes, self.num_nodes), (buffers, self.num_buffers)):
            if struct.unpack_from("<I", message, vector - 4)[0] != expected:
                raise ValueError("a record batch of another schema")
        return MessageView(
            layout=self,
            message=message,
            body=_PREFIX + size,
            num_rows=struct.unpack_from("<q", message, length)[0],
            nodes=self._pack_nodes.unpack_from(message, nodes),
            buffers=self._pack_buffers.unpack_from(message, buffers),
        )


class MessageFrame:
    """Messages of `num_rows` rows, of which the `fixed` buffers, (index, bytes), always have the same place and size.

    They come first in the body, then the other ones; buffers that are never given are empty.
    """

    def __init__(self, layout: MessageLayout, num_rows: int, fixed: Sequence[tuple[int, int]]) -> None:
        self._layout = layout
        metadata = bytearray(layout.template)
        struct.pack_into("<q", metadata, layout.length, num_rows)
        for node in range(layout.num_nodes):
            _PAIR.pack_into(metadata, layout.nodes + 16 * node, 0, 0)
        for node in layout.first_node.values():
            _PAIR.pack_into(metadata, layout.nodes + 16 * node, num_rows, 0)
        for buffer in range(layout.num_buffers):
            _PAIR.pack_into(metadata, layout.buffers + 16 * buffer, 0, 0)
        self._fixed_end = 0
        for buffer, size in fixed:
            _PAIR.pack_into(metadata, layout.buffers + 16 * buffer, self._fixed_end, size)
            self._fixed_end += size + (-size & 7)
        self._metadata = bytes(metadata)
        self._pack_fixed = struct.Struct("".join(f"{size + (-size & 7)}s" for _, size in fixed)).pack

    def pack(
        self, fixed: Sequence[bytes], variable: Sequence[tuple[int, Any]], nodes: Sequence[tuple[int, int, int]]
    ) -> bytes:
        """A message.

        Args:
            fixed: contents of the fixed buffers, at most of their size.
            variable: (index, bytes or a flat memoryview of bytes) of the others.
            nodes: (index, length, nulls) of the arrays that have not num_rows values without nulls, or are nested.
        """
        metadata = bytearray(self._metadata)
        first_buffer, first_node = self._layout.buffers, self._layout.nodes
        pieces: list[Any] = [metadata, self._pack_fixed(*fixed)]
        end = self._fixed_end
        for buffer, data in variable:
            if data:
                size = len(data)
                _PAIR.pack_into(metadata, first_buffer + 16 * buffer, end, size)
                pieces.append(data)
                if padding := -size & 7:
                    pieces.append(_PADDING[padding])
                end += size + padding
        for node, length, num_nulls in nodes:
            _PAIR.pack_into(metadata, first_node + 16 * node, length, num_nulls)
        struct.pack_into("<q", metadata, self._layout.body_length, end)
        return b"".join(pieces)


@dataclass(frozen=True, slots=True)
class MessageView:
    """The columns of a message as numpy views of it.

    Attributes:
        body: where it begins in the message.
        nodes: length and number of nulls of each array.
        buffers: offset in the body and length of each buffer.
    """

    layout: MessageLayout
    message: Any
    body: int
    num_rows: int
    nodes: tuple[int, ...]
    buffers: tuple[int, ...]

    def values(self, buffer: int, dtype: Any, count: int) -> np.ndarray:
        """The first `count` values of a buffer."""
        if count == 0:
            return np.empty(0, dtype)
        return np.frombuffer(self.message, dtype, count, self.body + self.buffers[2 * buffer])

    def column(self, name: str, dtype: Any) -> np.ndarray:
        """[rows] of a column of numbers; what a null holds means nothing."""
        return self.values(self.layout.first_buffer[name] + 1, dtype, self.num_rows)

    def valid(self, name: str) -> np.ndarray | None:
        """[rows]: whether a column has a value there. None: everywhere."""
        if not self.nodes[2 * self.layout.first_node[name] + 1]:
            return None
        return self._bits(self.layout.first_buffer[name], self.num_rows)

    def num_items(self, name: str) -> int:
        """Of all rows of a list column."""
        return self.nodes[2 * self.layout.first_node[name] + 2]

    def offsets(self, name: str) -> np.ndarray:
        """[rows + 1]: where each row of a list or string column begins in its items."""
        return self.values(self.layout.first_buffer[name] + 1, np.int32, self.num_rows + 1)

    def items(self, name: str, dtype: Any, count: int) -> np.ndarray:
        """The first items of a list column, row after row."""
        buffer = self.layout.first_buffer[name] + 3
        return self._bits(buffer, count) if dtype is np.bool_ else self.values(buffer, dtype, count)

    def strings(self, name: str, count: int | None = None) -> list[str]:
        """The first rows of a string column (all by default), nulls as empty strings."""
        return self.texts(self.layout.first_buffer[name] + 1, self.num_rows if count is None else count)

    def texts(self, buffer: int, count: int) -> list[str]:
        """Strings whose offsets are this buffer, and whose bytes the next."""
        offsets = self.values(buffer, np.int32, count + 1).tolist()
        start = self.body + self.buffers[2 * buffer + 2]
        return [str(self.message[start + a : start + b], "utf-8") for a, b in pairwise(offsets)] if count else []

    def _bits(self, buffer: int, count: int) -> np.ndarray:
        packed = self.values(buffer, np.uint8, -(-count // 8))
        bits = np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)
        bits.flags.writeable = False
        return bits


def numbers(name: str, code: str, values: Sequence[float]) -> array[Any]:
    """An array of C numbers of this code of the module `array`."""
    try:
        return array(code, values)
    except (TypeError, ValueError, OverflowError) as error:
        raise ReplayBufferError(f"column {name} cannot hold {values!r}: {error}") from error


def text(name: str, value: str) -> bytes:
    """A string as UTF-8."""
    try:
        return value.encode()
    except (AttributeError, UnicodeError) as error:
        raise ReplayBufferError(f"column {name} cannot hold {value!r}: {error}") from error


@lru_cache(maxsize=64)
def texts(name: str, values: tuple[str, ...]) -> tuple[bytes, bytes]:
    """Offsets and bytes of a string array."""
    encoded = [text(name, value) for value in values]
    return offsets([len(one) for one in encoded]), b"".join(encoded)


def offsets(lengths: Sequence[int]) -> bytes:
    """Of a list or string array with items or bytes of these lengths."""
    return struct.pack(f"<{len(lengths) + 1}i", *accumulate(lengths, initial=0))


def bitmap(valid: list[bool]) -> bytes:
    """Of the values that are not null."""
    return sum(1 << i for i, one in enumerate(valid) if one).to_bytes(-(-len(valid) // 8), "little")
