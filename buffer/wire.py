"""Messages between clients and shards: a JSON header, then frames of Arrow IPC bytes. Nothing is ever unpickled.

A request is {"wire", "id", "op", ...fields} plus frames; its reply repeats the id and has "ok": true with results, or
"ok": false with "error". Requests of one client reach a shard in order, each is answered once, and an answer that
nobody waits for any more is dropped by its id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from asyncrl.errors import ReplayBufferError
from asyncrl.types import GroupRef

WIRE_VERSION = 1
MAX_FRAME_BYTES = 1 << 30
"""A peer that sends a larger frame is disconnected: a bound on what a stray connection can make a shard allocate."""

_REF_INTEGERS = ("number", "num_rows", "num_tokens", "max_tokens", "min_version", "nbytes")


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

    def ids(self, name: str) -> list[bytes]:
        return [_group_id(item) for item in self.items(name)]

    def refs(self, name: str, *, shard: int) -> list[GroupRef]:
        return [ref_from_dict(item, shard=shard) for item in self.items(name)]


def pack(header: Mapping[str, Any], payloads: Sequence[Any] = ()) -> list[Any]:
    """Frames of a message, without the routing frame."""
    return [json.dumps({"wire": WIRE_VERSION, **header}, separators=(",", ":")).encode(), *payloads]


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
    if header.get("wire") != WIRE_VERSION:
        raise ReplayBufferError(
            f"unknown buffer protocol version {header.get('wire')!r}; this side speaks {WIRE_VERSION}: "
            "use the same asyncrl on every machine of the run"
        )
    return Message(header, list(frames[1:]))


def checksum(payload: Any) -> str:
    """xxh3 of a payload, as 16 hex digits. Made by the writer, checked by the shard and by every reader."""
    return xxhash.xxh3_64_hexdigest(payload)


def verify(payload: Any, expected: str, *, what: str) -> None:
    """Raises ReplayBufferError when the payload is not the one whose checksum was recorded."""
    found = checksum(payload)
    if found != expected:
        raise ReplayBufferError(f"{what} is corrupted: xxh3 checksum {found}, recorded {expected}")


def ref_to_dict(ref: GroupRef) -> dict[str, Any]:
    """JSON form of a reference, without the shard: that is the position in the reader's own address list."""
    return {"group_id": ref.group_id.hex(), **{name: getattr(ref, name) for name in _REF_INTEGERS}}


def ref_from_dict(value: Any, *, shard: int) -> GroupRef:
    """Inverse of ref_to_dict."""
    if not isinstance(value, dict):
        raise ReplayBufferError(f"a group reference is a JSON object; got {type(value).__name__}")
    integers = {name: _typed(value, name, int) for name in _REF_INTEGERS}
    return GroupRef(shard=shard, group_id=_group_id(value.get("group_id")), **integers)


def _group_id(value: Any) -> bytes:
    try:
        group_id = bytes.fromhex(value)
    except (TypeError, ValueError):
        group_id = b""
    if len(group_id) != 16:
        raise ReplayBufferError(f"a group id is 32 hex digits; got {str(value)[:80]!r}")
    return group_id


def _typed(header: Mapping[str, Any], name: str, kind: type) -> Any:
    value = header.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ReplayBufferError(f"message field {name!r} must be {kind.__name__}; got {str(value)[:80]!r}")
    return value
