"""Messages between clients and shards: a JSON header, then frames of records, ids or Arrow messages. Nothing is ever
unpickled.

A request is {"wire", "id", "op", ...fields} plus frames; its reply repeats the id and has "ok": true with results, or
"ok": false with "error". Requests of one client reach a shard in order, each is answered once, and an answer that
nobody waits for any more is dropped by its id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.buffer.schema import SCHEMA_VERSION
from asyncrl.errors import ReplayBufferError

PROTOCOL = f"2, trajectory schema {SCHEMA_VERSION}"
MAX_FRAME_BYTES = 1 << 30
"""A peer that sends a larger frame is disconnected: a bound on what a stray connection can make a shard allocate."""


@dataclass(frozen=True, slots=True)
class Message:
    """A parsed message. The accessors raise ReplayBufferError when a field is missing or of another type."""

    header: dict[str, Any]
    payloads: list[Any]

    def integer(self, name: str) -> int:
        return _typed(self.header, name, int)

    def text(self, name: str) -> str:
        return _typed(self.header, name, str)

    def items(self, name: str) -> list[Any]:
        return _typed(self.header, name, list)

    def number(self, name: str) -> float:
        return float(_typed(self.header, name, (int, float)))

    def identity(self, name: str) -> bytes:
        """A field of 16 bytes, written as hex."""
        return identity(self.text(name))

    def frame(self) -> memoryview:
        """The only frame after the header."""
        if len(self.payloads) != 1:
            raise ReplayBufferError(f"expected one frame after the header; got {len(self.payloads)}")
        return self.payloads[0]

    def ids(self) -> list[bytes]:
        """The ids in the only frame."""
        return split_ids(self.frame())


def pack(header: Mapping[str, Any], payloads: Sequence[Any] = ()) -> list[Any]:
    """Frames of a message, without the routing frame."""
    return [json.dumps({"wire": PROTOCOL, **header}, separators=(",", ":")).encode(), *payloads]


def unpack(frames: Sequence[Any]) -> Message:
    """Inverse of pack. Raises ReplayBufferError for anything that is not a message of this version."""
    if not frames:
        raise ReplayBufferError("empty message")
    try:
        header = json.loads(bytes(frames[0]))
    except (ValueError, RecursionError) as error:
        raise ReplayBufferError(f"message header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ReplayBufferError(f"message header is not a JSON object but {type(header).__name__}")
    if header.get("wire") != PROTOCOL:
        raise ReplayBufferError(
            f"unknown buffer protocol version {header.get('wire')!r}; this side speaks {PROTOCOL}: "
            "use the same asyncrl on every machine of the run"
        )
    return Message(header, list(frames[1:]))


def split_ids(frame: Any) -> list[bytes]:
    """Ids of 16 bytes that were joined to one frame."""
    data = bytes(frame)
    if len(data) % 16:
        raise ReplayBufferError(f"a frame of ids has a multiple of 16 bytes; got {len(data)}")
    return [data[at : at + 16] for at in range(0, len(data), 16)]


def identity(text: str) -> bytes:
    """16 bytes from hex."""
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != 16:
        raise ReplayBufferError(f"an identity is 32 hex digits; got {text[:80]!r}")
    return value


def _typed(header: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    value = header.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ReplayBufferError(f"message field {name!r} must be {kind}; got {str(value)[:80]!r}")
    return value
