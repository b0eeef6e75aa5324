"""The Arrow schema of a trajectory, and groups to and from it.

A generator encodes a group as one record batch (one row per rollout): the bytes of one Arrow IPC message, which are
stored as they are, one after the other, in a segment file, and which a learner wraps again without copying tokens.
The schema's metadata carries its version: a reader refuses one that it does not know. `tokens` holds prompt and
response; the other per-token columns are aligned with the response, `tokens[prompt_length:]`.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from asyncrl.buffer.message import MessageFrame, MessageLayout, MessageView, bitmap, numbers, offsets, text, texts
from asyncrl.errors import ReplayBufferError
from asyncrl.types import FINISH_REASONS, Group, GroupRef, Rollout

SCHEMA_VERSION = 2
VERSION_KEY = b"asyncrl.trajectory_version"

_ID = pa.binary(16)
SCHEMA = pa.schema(
    [
        pa.field("trajectory_id", _ID, nullable=False),
        pa.field("group_id", _ID, nullable=False),
        pa.field("number", pa.int64(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("group_size", pa.int16(), nullable=False),
        pa.field("group_index", pa.int16(), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("prompt_length", pa.int32(), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("behaviour_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("policy_versions", pa.list_(pa.int32()), nullable=False),
        pa.field("min_version", pa.int32(), nullable=False),
        pa.field("reward", pa.float32()),
        pa.field("reward_parts", pa.map_(pa.string(), pa.float32()), nullable=False),
        pa.field("token_rewards", pa.list_(pa.float32())),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("generator", pa.string(), nullable=False),
        pa.field("created_at", pa.float64(), nullable=False),
        pa.field("seconds", pa.float64(), nullable=False),
        pa.field("extra", pa.string()),
    ],
    metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()},
)
"""One trajectory = one row. reward is null where scoring failed (the cause is `error` in the JSON of `extra`);
created_at is unix seconds, seconds the time the rollout took; token_rewards is null without process rewards."""

LAYOUT = MessageLayout(SCHEMA)
# A map is a list of structs of keys and values: their buffers follow the list's two and the struct's one.
_PART_KEYS, _PART_VALUES = LAYOUT.first_buffer["reward_parts"] + 4, LAYOUT.first_buffer["reward_parts"] + 7
_PER_TOKEN = ("loss_mask", "behaviour_logprobs", "policy_versions")
_INT32 = np.dtype(np.int32)
_RESPONSE_DTYPES: dict[str, Any] = {
    "response": _INT32,
    "loss_mask": np.dtype(np.bool_),
    "behaviour_logprobs": np.dtype(np.float32),
    "policy_versions": np.dtype(np.int32),
}


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    """A group as it is stored: the Arrow message, its index entry (with shard 0), and how often it was trained on."""

    message: pa.Buffer
    ref: GroupRef
    uses: int = 0


def encode_group(group: Group) -> EncodedGroup:
    """The group as one Arrow IPC record batch message.

    Raises ReplayBufferError, which names the group, when ids, lengths, types, values or finish reasons are wrong.
    """
    if len(group.group_id) != 16 or not group.rollouts:
        raise ReplayBufferError(
            f"group {group.number} needs an id of 16 bytes and a rollout at least; "
            f"got {len(group.group_id)} bytes, {len(group.rollouts)} rollouts"
        )
    prompt = _cast(group.prompt_tokens, _INT32, f"group {group.number}: prompt_tokens")
    try:
        return _encode(group, prompt)
    except (TypeError, ValueError, BufferError):
        # An array of another type: converted where nothing is lost by it, else refused by name.
        return _encode(
            replace(group, rollouts=tuple(_cast_rollout(group, i) for i in range(len(group.rollouts)))), prompt
        )


def encode_groups(groups: Sequence[Group]) -> list[EncodedGroup]:
    """As encode_group for each. When one is not well formed, none is encoded."""
    return [encode_group(group) for group in groups]


def _encode(group: Group, prompt: np.ndarray) -> EncodedGroup:
    """Raises TypeError or ValueError when an array is not of the very type that is stored."""
    rollouts, n = group.rollouts, len(group.rollouts)
    responses = [r.response for r in rollouts]
    lengths = [length for (length,) in [response.shape for response in responses]]
    tokens = _join([part for response in responses for part in (prompt, response)], _INT32)
    masks, logprobs, versions = (_join_aligned(group, name, responses) for name in _PER_TOKEN)
    _check_logprobs(np.frombuffer(logprobs, np.float32), lengths, group)
    min_versions, max_version = _version_range(versions, masks, lengths)
    num_items, num_tokens = sum(lengths), len(tokens) // _INT32.itemsize
    rewards = numbers("reward", "f", [r.reward for r in rollouts])
    scored = [reward == reward for reward in rewards]
    parts = [item for r in rollouts for item in r.reward_parts.items()]
    part_ends = offsets([len(r.reward_parts) for r in rollouts]) if parts else b""
    errors = [r.error for r in rollouts]
    failed = [error is not None for error in errors]
    extra_ends, extra = texts("extra", tuple(map(_extra, errors))) if any(failed) else (b"", b"")
    reasons = tuple([r.finish_reason for r in rollouts])
    _check_finish_reasons(set(reasons))
    reason_ends, reason = texts("finish_reason", reasons)
    key_ends, keys = texts("reward_parts", tuple([key for key, _ in parts]))
    prompt_id, generator = text("prompt_id", group.prompt_id), text("generator", group.generator)
    frame = _frame(n)
    response_ends = frame.pack_ends(*accumulate(lengths, initial=0))
    fixed = (
        b"".join([xxhash.xxh3_128_digest(group.group_id + index) for index in frame.each_index]),
        group.group_id * n,
        numbers("number", "q", [group.number]).tobytes() * n,
        numbers("created_at", "d", [group.created_at]).tobytes() * n,
        numbers("seconds", "d", [r.seconds for r in rollouts]).tobytes(),
        *frame.constant,
        frame.pack_ends(*accumulate([prompt.size + length for length in lengths], initial=0)),
        prompt.size.to_bytes(4, "little") * n,
        response_ends,
        response_ends,
        response_ends,
        array("i", min_versions).tobytes(),
        rewards.tobytes(),
        bitmap(scored),
        bitmap(failed),
        _even_ends(n, len(prompt_id)),
        _even_ends(n, len(generator)),
        part_ends,
        reason_ends,
        extra_ends,
    )
    at, node = LAYOUT.first_buffer, LAYOUT.first_node
    variable = (
        (at["tokens"] + 3, tokens),
        (at["loss_mask"] + 3, np.packbits(np.frombuffer(masks, np.bool_), bitorder="little").tobytes()),
        (at["behaviour_logprobs"] + 3, logprobs),
        (at["policy_versions"] + 3, versions),
        (at["prompt_id"] + 2, prompt_id * n),
        (at["finish_reason"] + 2, reason),
        (at["generator"] + 2, generator * n),
        (at["extra"] + 2, extra),
        (_PART_KEYS, key_ends),
        (_PART_KEYS + 1, keys),
        (_PART_VALUES, numbers("reward_parts", "f", [value for _, value in parts]).tobytes()),
    )
    nodes = (
        (node["tokens"] + 1, num_tokens, 0),
        *[(node[name] + 1, num_items, 0) for name in _PER_TOKEN],
        *[(node["reward_parts"] + nested, len(parts), 0) for nested in (1, 2, 3)],
        (node["reward"], n, n - sum(scored)),
        (node["token_rewards"], n, n),
        (node["extra"], n, n - sum(failed)),
    )
    message = pa.py_buffer(frame.messages.pack(fixed, variable, nodes))
    mean, std = _spread(rewards)
    ref = GroupRef(
        shard=0,
        group_id=group.group_id,
        number=group.number,
        num_rows=n,
        num_tokens=num_tokens,
        max_tokens=prompt.size + max(lengths),
        min_version=_oldest(min_versions),
        max_version=max_version,
        nbytes=message.size,
        reward_mean=mean,
        reward_std=std,
    )
    return EncodedGroup(message, ref)


class _Frame(NamedTuple):
    """What only depends on the number of rows."""

    messages: MessageFrame
    pack_ends: Callable[..., bytes]  # the n + 1 offsets of a list or string column
    each_index: tuple[bytes, ...]
    constant: tuple[bytes, ...]  # group_size, group_index, and token_rewards, which are all null


@lru_cache(maxsize=64)
def _frame(n: int) -> _Frame:
    at = LAYOUT.first_buffer
    ends, bits = 4 * n + 4, -(-n // 8)
    fixed = [
        *((at[name] + 1, 16 * n) for name in ("trajectory_id", "group_id")),
        *((at[name] + 1, 8 * n) for name in ("number", "created_at", "seconds")),
        *((at[name] + 1, 2 * n) for name in ("group_size", "group_index")),
        *((at["token_rewards"], bits), (at["token_rewards"] + 1, ends)),
        *((at["tokens"] + 1, ends), (at["prompt_length"] + 1, 4 * n)),
        *((at[name] + 1, ends) for name in _PER_TOKEN),
        *((at[name] + 1, 4 * n) for name in ("min_version", "reward")),
        *((at["reward"], bits), (at["extra"], bits)),
        *((at[name] + 1, ends) for name in ("prompt_id", "generator", "reward_parts", "finish_reason", "extra")),
    ]
    each = tuple(i.to_bytes(2, "little") for i in range(n))
    pack_ends = struct.Struct(f"<{n + 1}i").pack
    return _Frame(
        MessageFrame(LAYOUT, n, fixed),
        pack_ends,
        each,
        (n.to_bytes(2, "little", signed=True) * n, b"".join(each), b"", b""),
    )


@lru_cache(maxsize=256)
def _even_ends(n: int, size: int) -> bytes:
    """The offsets of n strings of that many bytes."""
    return offsets([size] * n)


def _extra(error: str | None) -> str:
    return "" if error is None else json.dumps({"error": error})


def decode_group(message: Any) -> Group:
    """Inverse of encode_group, for the message of one whole group in any buffer. Arrays are read-only views of it."""
    try:
        return _decode(message)
    except (ValueError, IndexError, struct.error) as error:
        raise ReplayBufferError(f"a stored group is not an Arrow record batch message: {error}") from error


def _decode(message: Any) -> Group:
    view = LAYOUT.unpack(message)
    prompt_length = int(view.column("prompt_length", np.int32)[0])
    bounds = view.offsets("tokens").tolist()
    tokens = view.items("tokens", np.int32, bounds[-1])
    per_token: list[list[np.ndarray]] = []
    for name in _PER_TOKEN:
        ends = view.offsets(name).tolist()
        items = view.items(name, _RESPONSE_DTYPES[name].type, ends[-1])
        per_token.append([items[start:end] for start, end in pairwise(ends)])
    rewards = view.column("reward", np.float32)
    if (scored := view.valid("reward")) is not None:
        rewards = np.where(scored, rewards, np.float32("nan"))
    failed = view.valid("extra")
    has_extra = [True] * view.num_rows if failed is None else failed.tolist()
    extras = view.strings("extra") if any(has_extra) else has_extra
    rollouts = tuple(
        Rollout(
            response=tokens[start + prompt_length : end],
            loss_mask=mask,
            behaviour_logprobs=logprobs,
            policy_versions=versions,
            reward=reward,
            finish_reason=reason,
            seconds=seconds,
            reward_parts=parts,
            error=json.loads(extra).get("error") if has else None,
        )
        for (start, end), mask, logprobs, versions, reward, reason, seconds, parts, has, extra in zip(
            pairwise(bounds),
            *per_token,
            rewards.tolist(),
            view.strings("finish_reason"),
            view.column("seconds", np.float64).tolist(),
            _reward_parts(view),
            has_extra,
            extras,
            strict=True,
        )
    )
    return Group(
        group_id=view.column("group_id", "V16")[0].tobytes(),
        number=int(view.column("number", np.int64)[0]),
        prompt_id=view.strings("prompt_id", 1)[0],
        prompt_tokens=tokens[bounds[0] : bounds[0] + prompt_length],
        rollouts=rollouts,
        generator=view.strings("generator", 1)[0],
        created_at=float(view.column("created_at", np.float64)[0]),
    )


def _reward_parts(view: MessageView) -> list[dict[str, float]]:
    ends = view.offsets("reward_parts").tolist()
    if ends[-1] == 0:
        return [{} for _ in range(view.num_rows)]
    names = view.texts(_PART_KEYS, ends[-1])
    values = view.values(_PART_VALUES, np.float32, ends[-1]).tolist()
    return [dict(zip(names[a:b], values[a:b], strict=True)) for a, b in pairwise(ends)]


def read_batch(message: Any) -> pa.RecordBatch:
    """The record batch of one Arrow IPC message. Raises ReplayBufferError for anything else."""
    try:
        return pa.ipc.read_record_batch(pa.py_buffer(message), SCHEMA)
    except (pa.ArrowException, OSError, ValueError, EOFError) as error:
        raise ReplayBufferError(f"a stored group is not an Arrow record batch message: {error}") from error


def check_schema(schema: pa.Schema, *, what: str = "these trajectories") -> None:
    """Raises ReplayBufferError unless `schema` is the trajectory schema of the version that this code reads."""
    found = (schema.metadata or {}).get(VERSION_KEY)
    if found is None:
        raise ReplayBufferError(
            f"{what}: not a trajectory schema, its metadata lacks {VERSION_KEY.decode()}; its columns are "
            f"{', '.join(schema.names[:30])}"
        )
    if found != str(SCHEMA_VERSION).encode():
        raise ReplayBufferError(
            f"{what}: unknown trajectory schema version {found.decode(errors='replace')!r}: this asyncrl reads version "
            f"{SCHEMA_VERSION}; read it with the asyncrl that wrote it"
        )
    if not schema.equals(SCHEMA):
        raise ReplayBufferError(f"{what}: {_schema_difference(schema)} (trajectory schema version {SCHEMA_VERSION})")


def groups_to_batch(groups: Sequence[Group]) -> pa.RecordBatch:
    """One row per rollout, group after group. Raises ReplayBufferError as encode_group."""
    batches = [read_batch(encoded.message) for encoded in encode_groups(groups)]
    return batches[0] if len(batches) == 1 else pa.Table.from_batches(batches, SCHEMA).combine_chunks().to_batches()[0]


def describe(batch: pa.RecordBatch, nbytes: int) -> GroupRef:
    """Index entry (with shard 0) of a batch from outside, after checking that it is one whole, well-formed group."""
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        raise ReplayBufferError(f"a group is malformed: {error}") from error
    for field, column in zip(SCHEMA, batch.columns, strict=True):
        inner = column.values.null_count if pa.types.is_list(field.type) else 0
        if inner or (not field.nullable and column.null_count):
            raise ReplayBufferError(f"a group is malformed: nulls in column {field.name}")
    group_id, number = _only_value(batch, "group_id"), _only_value(batch, "number")
    name = f"group {number} ({group_id.hex()})"
    prompt_length = _only_value(batch, "prompt_length")
    indices = batch.column("group_index").to_numpy()
    group_size = _only_value(batch, "group_size")
    if group_size != batch.num_rows or (indices != np.arange(batch.num_rows)).any():
        raise ReplayBufferError(f"{name} is not whole: group_size is {group_size}, its rows are {indices.tolist()}")
    lengths = np.diff(batch.column("tokens").offsets.to_numpy())
    if not 0 <= prompt_length <= lengths.min():
        raise ReplayBufferError(f"{name}: prompt_length {prompt_length} exceeds a row's {lengths.min()} tokens")
    for column in _PER_TOKEN:
        if (np.diff(batch.column(column).offsets.to_numpy()) != lengths - prompt_length).any():
            raise ReplayBufferError(f"{name}: column {column} is not aligned with the response tokens")
    flat = {column: np.concatenate(list_rows(batch.column(column))) for column in _PER_TOKEN}
    _check_logprobs(flat["behaviour_logprobs"], (lengths - prompt_length).tolist())
    _check_finish_reasons(set(batch.column("finish_reason").to_pylist()))
    mean, std = _spread(batch.column("reward").drop_null().to_pylist())
    return GroupRef(
        shard=0,
        group_id=group_id,
        number=number,
        num_rows=batch.num_rows,
        num_tokens=int(lengths.sum()),
        max_tokens=int(lengths.max()),
        min_version=_oldest(batch.column("min_version").to_pylist()),
        max_version=int(flat["policy_versions"].max()) if flat["policy_versions"].size else -1,
        nbytes=nbytes,
        reward_mean=mean,
        reward_std=std,
    )


def list_rows(column: pa.ListArray) -> list[np.ndarray]:
    """Rows of a list column as numpy views (booleans are unpacked once for the whole column)."""
    values = column.values.to_numpy(zero_copy_only=False)
    return [values[start:end] for start, end in pairwise(column.offsets.to_pylist())]


def _schema_difference(schema: pa.Schema) -> str:
    missing = [name for name in SCHEMA.names if name not in schema.names]
    unknown = [name for name in schema.names if name not in SCHEMA.names]
    if missing or unknown:
        return f"columns differ: missing {missing}, unknown {unknown}"
    for field in SCHEMA:
        found = schema.field(field.name)
        if not found.equals(field):
            return f"column {field.name} is {found.type} (nullable {found.nullable}), not {field.type}"
    return f"columns are in another order: {schema.names}"


def _only_value(batch: pa.RecordBatch, name: str) -> Any:
    values = set(batch.column(name).to_pylist())
    if len(values) != 1:
        raise ReplayBufferError(f"a group has one {name} in all its rows; got {len(values)}")
    return values.pop()


def _check_finish_reasons(reasons: set[str]) -> None:
    if unknown := reasons.difference(FINISH_REASONS):
        raise ReplayBufferError(f"finish_reason must be one of {', '.join(FINISH_REASONS)}; got {unknown}")


def _oldest(min_versions: Sequence[int]) -> int:
    """Of the rollouts that sampled a token; -1 without any. One that sampled none does not age its group."""
    return min((version for version in min_versions if version >= 0), default=-1)


def _spread(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation of what is not NaN; NaN without any."""
    scored = [r for r in rewards if r == r]
    if not scored:
        return float("nan"), float("nan")
    mean = sum(scored) / len(scored)
    return mean, math.sqrt(sum([(r - mean) ** 2 for r in scored]) / len(scored))


def _check_logprobs(logprobs: np.ndarray, lengths: Sequence[int], group: Group | None = None) -> None:
    if not (finite := np.isfinite(logprobs)).all():
        at = int(np.argmin(finite))
        row = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
        where = f"rollout {row}" if group is None else f"group {group.number}, rollout {row}"
        raise ReplayBufferError(f"{where}: behaviour_logprobs holds {logprobs[at]}; logprobs must be finite")


def _version_range(versions: bytes, masks: bytes, lengths: list[int]) -> tuple[list[int], int]:
    """The oldest version of each row's sampled tokens (-1 without any), and the newest of all tokens.

    versions, masks: int32 and bool [sum of lengths].
    """
    ends = list(accumulate(lengths, initial=0))
    is_one = versions == versions[:4] * ends[-1]
    if is_one and all(lengths) and all(masks[a] or masks[b - 1] for a, b in pairwise(ends)):
        newest = int.from_bytes(versions[:4], "little", signed=True)
        return [newest] * len(lengths), newest
    values = np.frombuffer(versions, np.int32)
    no_version = np.iinfo(np.int32).max
    sampled = np.where(np.frombuffer(masks, np.bool_), values, no_version)
    oldest = [int(sampled[a:b].min(initial=no_version)) for a, b in pairwise(ends)]
    return [-1 if version == no_version else version for version in oldest], int(values.max(initial=-1))


def _join(arrays: Sequence[np.ndarray], dtype: np.dtype) -> bytes:
    """Raises TypeError or BufferError unless all are arrays of this very type, each in one piece."""
    if [array.dtype for array in arrays].count(dtype) != len(arrays):
        raise TypeError(f"arrays that are not all {dtype}")
    return b"".join(arrays)


def _join_aligned(group: Group, name: str, responses: Sequence[np.ndarray]) -> bytes:
    """Raises TypeError or ValueError as _join, ReplayBufferError when one has another length than the response."""
    arrays = [getattr(r, name) for r in group.rollouts]
    joined = _join(arrays, _RESPONSE_DTYPES[name])
    if [array.shape for array in arrays] != [response.shape for response in responses]:
        for index, (array, response) in enumerate(zip(arrays, responses, strict=True)):
            if array.ndim != 1:
                raise ValueError(f"an array of {array.ndim} dimensions")
            if len(array) != len(response):
                raise ReplayBufferError(
                    f"group {group.number}, rollout {index}: {name} has {len(array)} values for {len(response)} "
                    "response tokens"
                )
    return joined


def _cast_rollout(group: Group, index: int) -> Rollout:
    rollout = group.rollouts[index]
    name = f"group {group.number}, rollout {index}"
    return replace(rollout, **{f: _cast(getattr(rollout, f), d, f"{name}: {f}") for f, d in _RESPONSE_DTYPES.items()})


def _cast(values: Any, dtype: np.dtype, name: str) -> np.ndarray:
    array = np.asarray(values, dtype=dtype if len(values) == 0 else None)
    if array.ndim != 1 or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ReplayBufferError(f"{name} must be one-dimensional {dtype}; got {array.dtype} of shape {array.shape}")
    return np.ascontiguousarray(array, dtype)
