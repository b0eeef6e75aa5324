"""The Arrow schema of a trajectory, and groups to and from it.

A generator encodes a group as one record batch (one row per rollout) in an Arrow IPC stream; those bytes travel and are
stored as they are, and a learner wraps them again without copying tokens. The schema's metadata carries its version: a
reader refuses one that it does not know. `tokens` holds prompt and response; the other per-token columns are aligned
with the response, `tokens[prompt_length:]`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from asyncrl.errors import ReplayBufferError
from asyncrl.types import FINISH_REASONS, Group, GroupRef, Rollout

SCHEMA_VERSION = 1
VERSION_KEY = b"asyncrl.trajectory_version"

_ID = pa.binary(16)
_REASON = pa.dictionary(pa.int8(), pa.string())
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
        pa.field("finish_reason", _REASON, nullable=False),
        pa.field("generator", pa.string(), nullable=False),
        pa.field("created_at", pa.float64(), nullable=False),
        pa.field("seconds", pa.float64(), nullable=False),
        pa.field("extra", pa.string()),
    ],
    metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()},
)
"""One trajectory = one row. reward is null where scoring failed (the cause is `error` in the JSON of `extra`);
created_at is unix seconds, seconds the time the rollout took; token_rewards is null without process rewards."""

_PER_TOKEN = ("loss_mask", "behaviour_logprobs", "policy_versions")
_RESPONSE_DTYPES = {
    "response": np.int32,
    "loss_mask": np.bool_,
    "behaviour_logprobs": np.float32,
    "policy_versions": np.int32,
}


def encode_group(group: Group) -> pa.Buffer:
    """The group as the bytes of an Arrow IPC stream. Raises ReplayBufferError when it is not well formed."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(group_to_batch(group))
    return sink.getvalue()


def decode_group(payload: Any) -> Group:
    """Inverse of encode_group; `payload` is any buffer. Arrays are read-only views of it."""
    return batch_to_group(read_batch(payload))


def read_batch(payload: Any) -> pa.RecordBatch:
    """The one record batch of an IPC stream. Raises ReplayBufferError for anything else, unknown versions included."""
    try:
        with pa.ipc.open_stream(payload) as reader:
            check_schema(reader.schema)
            batches = list(reader)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ReplayBufferError(f"a stored group is not an Arrow IPC stream: {error}") from error
    if len(batches) != 1:
        raise ReplayBufferError(f"a stored group is one record batch; this stream has {len(batches)}")
    return batches[0]


def check_schema(schema: pa.Schema) -> None:
    """Raises ReplayBufferError unless `schema` is the trajectory schema of the version that this code reads."""
    found = (schema.metadata or {}).get(VERSION_KEY)
    if found is None:
        raise ReplayBufferError(f"not a trajectory schema: its metadata lacks {VERSION_KEY.decode()}")
    if found != str(SCHEMA_VERSION).encode():
        raise ReplayBufferError(
            f"unknown trajectory schema version {found.decode(errors='replace')!r}: this asyncrl reads version "
            f"{SCHEMA_VERSION}; use the same asyncrl on every machine of the run"
        )
    if not schema.equals(SCHEMA):
        raise ReplayBufferError(f"columns differ from trajectory schema version {SCHEMA_VERSION}: {schema.to_string()}")


def group_to_batch(group: Group) -> pa.RecordBatch:
    """One row per rollout. Raises ReplayBufferError when ids, lengths, types or finish reasons are wrong."""
    rollouts, size = group.rollouts, len(group.rollouts)
    if len(group.group_id) != 16 or not rollouts:
        raise ReplayBufferError(
            f"a group needs an id of 16 bytes and a rollout at least; got {len(group.group_id)} bytes, {size} rollouts"
        )
    prompt = _cast(group.prompt_tokens, np.int32, "prompt_tokens")
    tokens = {name: _response_column(rollouts, name) for name in _RESPONSE_DTYPES}
    columns: dict[str, list[Any]] = {
        "trajectory_id": [xxhash.xxh3_128_digest(group.group_id + i.to_bytes(2, "little")) for i in range(size)],
        "group_id": [group.group_id] * size,
        "number": [group.number] * size,
        "prompt_id": [group.prompt_id] * size,
        "group_size": [size] * size,
        "group_index": list(range(size)),
        "tokens": [np.concatenate((prompt, response)) for response in tokens["response"]],
        "prompt_length": [prompt.size] * size,
        **{name: tokens[name] for name in _PER_TOKEN},
        "min_version": [r.min_version for r in rollouts],
        "reward": [None if np.isnan(r.reward) else r.reward for r in rollouts],
        "reward_parts": [list(r.reward_parts.items()) for r in rollouts],
        "token_rewards": [None] * size,
        "finish_reason": [r.finish_reason for r in rollouts],
        "generator": [group.generator] * size,
        "created_at": [group.created_at] * size,
        "seconds": [r.seconds for r in rollouts],
        "extra": [None if r.error is None else json.dumps({"error": r.error}) for r in rollouts],
    }
    return pa.record_batch([_array(field, columns[field.name]) for field in SCHEMA], schema=SCHEMA)


def batch_to_group(batch: pa.RecordBatch) -> Group:
    """Inverse of group_to_batch for a batch that check_schema and describe accept."""
    column = {name: batch.column(name) for name in SCHEMA.names}
    prompt_length = column["prompt_length"][0].as_py()
    tokens = list_rows(column["tokens"])
    plain = {n: column[n].to_pylist() for n in ("reward", "finish_reason", "seconds", "reward_parts", "extra")}
    rollouts = tuple(
        Rollout(
            response=row[prompt_length:],
            loss_mask=mask,
            behaviour_logprobs=logprobs,
            policy_versions=versions,
            reward=float("nan") if reward is None else reward,
            finish_reason=reason,
            seconds=seconds,
            reward_parts=dict(parts),
            error=None if extra is None else json.loads(extra).get("error"),
        )
        for row, mask, logprobs, versions, reward, reason, seconds, parts, extra in zip(
            tokens, *(list_rows(column[name]) for name in _PER_TOKEN), *plain.values(), strict=True
        )
    )
    return Group(
        group_id=column["group_id"][0].as_py(),
        number=column["number"][0].as_py(),
        prompt_id=column["prompt_id"][0].as_py(),
        prompt_tokens=tokens[0][:prompt_length],
        rollouts=rollouts,
        generator=column["generator"][0].as_py(),
        created_at=column["created_at"][0].as_py(),
    )


def describe(batch: pa.RecordBatch, nbytes: int) -> GroupRef:
    """Index entry (with shard 0) of a batch from outside, after checking that it is one whole, well-formed group."""
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        raise ReplayBufferError(f"a group is malformed: {error}") from error
    for field, array in zip(SCHEMA, batch.columns, strict=True):
        inner = array.values.null_count if pa.types.is_list(field.type) else 0
        if inner or (not field.nullable and array.null_count):
            raise ReplayBufferError(f"a group is malformed: nulls in column {field.name}")
    group_id, number = _only_value(batch, "group_id"), _only_value(batch, "number")
    prompt_length = _only_value(batch, "prompt_length")
    indices = batch.column("group_index").to_numpy()
    if _only_value(batch, "group_size") != batch.num_rows or (indices != np.arange(batch.num_rows)).any():
        raise ReplayBufferError(f"group {group_id.hex()} is not whole: its rows are {indices.tolist()}")
    lengths = np.diff(batch.column("tokens").offsets.to_numpy())
    if not 0 <= prompt_length <= lengths.min():
        raise ReplayBufferError(f"group {group_id.hex()}: prompt_length {prompt_length} exceeds a row's tokens")
    for name in _PER_TOKEN:
        if (np.diff(batch.column(name).offsets.to_numpy()) != lengths - prompt_length).any():
            raise ReplayBufferError(f"group {group_id.hex()}: column {name} is not aligned with the response tokens")
    return GroupRef(
        shard=0,
        group_id=group_id,
        number=number,
        num_rows=batch.num_rows,
        num_tokens=int(lengths.sum()),
        max_tokens=int(lengths.max()),
        min_version=int(batch.column("min_version").to_numpy().min()),
        nbytes=nbytes,
    )


def list_rows(column: pa.ListArray) -> list[np.ndarray]:
    """Rows of a list column as numpy views (booleans are unpacked once for the whole column)."""
    values = column.values.to_numpy(zero_copy_only=False)
    return [values[start:end] for start, end in pairwise(column.offsets.to_pylist())]


def _only_value(batch: pa.RecordBatch, name: str) -> Any:
    values = set(batch.column(name).to_pylist())
    if len(values) != 1:
        raise ReplayBufferError(f"a group has one {name} in all its rows; got {len(values)}")
    return values.pop()


def _response_column(rollouts: Sequence[Rollout], name: str) -> list[np.ndarray]:
    arrays = [_cast(getattr(r, name), _RESPONSE_DTYPES[name], name) for r in rollouts]
    for index, (array, rollout) in enumerate(zip(arrays, rollouts, strict=True)):
        if array.size != len(rollout.response):
            raise ReplayBufferError(
                f"rollout {index}: {name} has {array.size} values for {len(rollout.response)} response tokens"
            )
    return arrays


def _cast(values: Any, dtype: Any, name: str) -> np.ndarray:
    array = np.asarray(values, dtype=dtype if len(values) == 0 else None)
    if array.ndim != 1 or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ReplayBufferError(
            f"{name} must be one-dimensional {np.dtype(dtype)}; got {array.dtype} of shape {array.shape}"
        )
    return array.astype(dtype, copy=False)


def _array(field: pa.Field, values: list[Any]) -> pa.Array:
    if field.name != "finish_reason":
        try:
            return pa.array(values, field.type)
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise ReplayBufferError(f"column {field.name} cannot hold {values!r}: {error}") from error
    unknown = set(values) - set(FINISH_REASONS)
    if unknown:
        raise ReplayBufferError(f"finish_reason must be one of {', '.join(FINISH_REASONS)}; got {unknown}")
    # The same dictionary in every batch, so that batches of many groups make one table.
    indices = pa.array([FINISH_REASONS.index(value) for value in values], pa.int8())
    return pa.DictionaryArray.from_arrays(indices, pa.array(FINISH_REASONS, pa.string()))
