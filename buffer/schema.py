"""The Arrow schema of a trajectory, and groups to and from it.

A generator encodes a group as one record batch (one row per rollout): the bytes of one Arrow IPC message, which are
stored as they are, one after the other, in a segment file, and which a learner wraps again without copying tokens.
The schema's metadata carries its version: a reader refuses one that it does not know. `tokens` holds prompt and
response; the other per-token columns are aligned with the response, `tokens[prompt_length:]`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

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
    """The group as one Arrow IPC record batch message. Raises ReplayBufferError when it is not well formed."""
    return encode_groups([group])[0]


def encode_groups(groups: Sequence[Group]) -> list[EncodedGroup]:
    """As encode_group for each; several at once cost a fraction per group, since Arrow arrays are built once for all.

    Raises ReplayBufferError, which names the group, when one is not well formed; then none is encoded.
    """
    if not groups:
        return []
    batch = groups_to_batch(groups)
    sizes = [len(group.rollouts) for group in groups]
    ends = np.cumsum(sizes).tolist()
    refs = _describe_groups(batch, groups, sizes, ends)
    messages = [batch.slice(end - size, size).serialize() for size, end in zip(sizes, ends, strict=True)]
    return [
        EncodedGroup(message, GroupRef(shard=0, nbytes=message.size, **ref))
        for message, ref in zip(messages, refs, strict=True)
    ]


def decode_group(message: Any) -> Group:
    """Inverse of encode_group; `message` is any buffer. Arrays are read-only views of it."""
    return batch_to_group(read_batch(message))


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
    """One row per rollout, group after group.

    Raises ReplayBufferError, which names the group, when ids, lengths, types, values or finish reasons are wrong.
    """
    for group in groups:
        _check_group(group)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sizes = np.array([len(group.rollouts) for group in groups], np.int16)
    prompts = [_cast(group.prompt_tokens, _INT32, f"group {group.number}: prompt_tokens") for group in groups]
    per_row = [(group, index) for group in groups for index in range(len(group.rollouts))]
    responses, flat = _response_columns(per_row)
    lengths = np.array([len(r) for r in responses], np.int32)
    prompt_lengths = np.repeat(np.array([p.size for p in prompts], np.int32), sizes)
    _check_values(flat, lengths, per_row)
    row_prompts = (prompt for prompt, size in zip(prompts, sizes.tolist(), strict=True) for _ in range(size))
    tokens = [part for pair in zip(row_prompts, responses, strict=True) for part in pair]
    parts = [list(r.reward_parts.items()) for r in rollouts]
    errors = [None if r.error is None else json.dumps({"error": r.error}) for r in rollouts]
    columns: dict[str, pa.Array | np.ndarray | list[Any]] = {
        "trajectory_id": _binary16([xxhash.xxh3_128_digest(g.group_id + i.to_bytes(2, "little")) for g, i in per_row]),
        "group_id": _binary16([group.group_id for group, _ in per_row]),
        "number": np.repeat(_per_group(groups, "number", np.int64), sizes),
        "prompt_id": [group.prompt_id for group, _ in per_row],
        "group_size": np.repeat(sizes, sizes),
        "group_index": np.array([index for _, index in per_row], np.int16),
        "tokens": _list_array(np.concatenate(tokens), lengths + prompt_lengths),
        "prompt_length": prompt_lengths,
        **{name: _list_array(flat[name], lengths) for name in _PER_TOKEN},
        "min_version": _min_versions(flat["policy_versions"], flat["loss_mask"], lengths),
        "reward": _rewards(rollouts),
        "reward_parts": parts,
        "token_rewards": [None] * len(rollouts),
        "finish_reason": [r.finish_reason for r in rollouts],
        "generator": [group.generator for group, _ in per_row],
        "created_at": np.repeat(_per_group(groups, "created_at", np.float64), sizes),
        "seconds": [r.seconds for r in rollouts],
        "extra": errors,
    }
    return pa.RecordBatch.from_arrays([_array(name, columns[name]) for name in SCHEMA.names], schema=SCHEMA)


def batch_to_group(batch: pa.RecordBatch) -> Group:
    """Inverse of groups_to_batch for one group, for a batch that describe accepts."""
    column = {name: batch.column(i) for i, name in enumerate(SCHEMA.names)}
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
    _check_values(flat, lengths - prompt_length)
    _check_finish_reasons(set(batch.column("finish_reason").to_pylist()))
    mean, std = _spread(batch.column("reward").drop_null().to_pylist())
    return GroupRef(
        shard=0,
        group_id=group_id,
        number=number,
        num_rows=batch.num_rows,
        num_tokens=int(lengths.sum()),
        max_tokens=int(lengths.max()),
        min_version=int(batch.column("min_version").to_numpy().min()),
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


def _check_group(group: Group) -> None:
    if len(group.group_id) != 16 or not group.rollouts:
        raise ReplayBufferError(
            f"group {group.number} needs an id of 16 bytes and a rollout at least; "
            f"got {len(group.group_id)} bytes, {len(group.rollouts)} rollouts"
        )
    _check_finish_reasons({r.finish_reason for r in group.rollouts})


def _check_finish_reasons(reasons: set[str]) -> None:
    if unknown := reasons.difference(FINISH_REASONS):
        raise ReplayBufferError(f"finish_reason must be one of {', '.join(FINISH_REASONS)}; got {unknown}")


def _describe_groups(
    batch: pa.RecordBatch, groups: Sequence[Group], sizes: list[int], ends: list[int]
) -> list[dict[str, Any]]:
    """The fields of each group's GroupRef, but for shard and nbytes."""
    tokens = np.diff(batch.column("tokens").offsets.to_numpy()).tolist()
    versions = batch.column("policy_versions").values.to_numpy()
    offsets = batch.column("policy_versions").offsets.to_pylist()
    min_versions = batch.column("min_version").to_pylist()
    rewards = batch.column("reward").to_numpy(zero_copy_only=False).astype(np.float64).tolist()
    described = []
    for group, size, end in zip(groups, sizes, ends, strict=True):
        start = end - size
        sampled = versions[offsets[start] : offsets[end]]
        mean, std = _spread(rewards[start:end])
        described.append(
            {
                "group_id": group.group_id,
                "number": group.number,
                "num_rows": size,
                "num_tokens": sum(tokens[start:end]),
                "max_tokens": max(tokens[start:end]),
                "min_version": min(min_versions[start:end]),
                "max_version": int(sampled.max()) if sampled.size else -1,
                "reward_mean": mean,
                "reward_std": std,
            }
        )
    return described


def _spread(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation of what is not NaN; NaN without any."""
    scored = [r for r in rewards if r == r]
    if not scored:
        return float("nan"), float("nan")
    mean = sum(scored) / len(scored)
    return mean, math.sqrt(sum((r - mean) ** 2 for r in scored) / len(scored))


def _check_values(
    flat: dict[str, np.ndarray], lengths: np.ndarray, rows: Sequence[tuple[Group, int]] | None = None
) -> None:
    logprobs = flat["behaviour_logprobs"]
    if not math.isfinite(logprobs.sum(dtype=np.float64)):
        at = int(np.argmin(np.isfinite(logprobs)))
        row = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
        where = f"rollout {row}" if rows is None else _row_name(rows[row])
        raise ReplayBufferError(f"{where}: behaviour_logprobs holds {logprobs[at]}; logprobs must be finite")


def _row_name(row: tuple[Group, int]) -> str:
    return f"group {row[0].number}, rollout {row[1]}"


def _min_versions(versions: np.ndarray, mask: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int32 [rows]: oldest version of the tokens that were sampled; -1 in a row without any."""
    if lengths.all() and versions.min() == (newest := versions.max()) >= 0:
        return np.full(lengths.size, newest, np.int32)
    found = np.full(lengths.size, -1, np.int32)
    rows = np.flatnonzero(lengths)
    if rows.size:
        no_version = np.iinfo(np.int32).max
        starts = (np.cumsum(lengths) - lengths)[rows]
        oldest = np.minimum.reduceat(np.where(mask, versions, no_version), starts)
        found[rows] = np.where(oldest == no_version, -1, oldest)
    return found


def _response_columns(rows: Sequence[tuple[Group, int]]) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """The rows' responses, and the columns that are aligned with them, each as one flat array."""
    rollouts = [group.rollouts[index] for group, index in rows]
    arrays = {name: [getattr(r, name) for r in rollouts] for name in _RESPONSE_DTYPES}
    for name, values in arrays.items():
        if {getattr(a, "dtype", None) for a in values} != {_RESPONSE_DTYPES[name]} or {a.ndim for a in values} != {1}:
            arrays[name] = [
                _cast(a, _RESPONSE_DTYPES[name], f"{_row_name(row)}: {name}")
                for a, row in zip(values, rows, strict=True)
            ]
    lengths = [len(a) for a in arrays["response"]]
    for name in _PER_TOKEN:
        found = [len(a) for a in arrays[name]]
        if found != lengths:
            at = next(i for i, (a, b) in enumerate(zip(found, lengths, strict=True)) if a != b)
            raise ReplayBufferError(
                f"{_row_name(rows[at])}: {name} has {found[at]} values for {lengths[at]} response tokens"
            )
    return arrays["response"], {name: np.concatenate(arrays[name]) for name in _PER_TOKEN}


def _cast(values: Any, dtype: np.dtype, name: str) -> np.ndarray:
    array = np.asarray(values, dtype=dtype if len(values) == 0 else None)
    if array.ndim != 1 or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ReplayBufferError(f"{name} must be one-dimensional {dtype}; got {array.dtype} of shape {array.shape}")
    return array.astype(dtype, copy=False)


def _per_group(groups: Sequence[Group], name: str, dtype: Any) -> np.ndarray:
    try:
        return np.array([getattr(group, name) for group in groups], dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise ReplayBufferError(f"column {name} cannot hold {[getattr(g, name) for g in groups]!r}: {error}") from error


def _rewards(rollouts: Sequence[Rollout]) -> pa.Array:
    try:
        return pa.array(np.array([r.reward for r in rollouts], np.float32), from_pandas=True)  # NaN becomes null
    except (TypeError, ValueError) as error:
        raise ReplayBufferError(f"column reward cannot hold {[r.reward for r in rollouts]!r}: {error}") from error


def _binary16(ids: Sequence[bytes]) -> pa.Array:
    return pa.Array.from_buffers(_ID, len(ids), [None, pa.py_buffer(b"".join(ids))], 0)


def _list_array(flat: np.ndarray, lengths: np.ndarray) -> pa.Array:
    offsets = np.zeros(lengths.size + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))


def _array(name: str, values: pa.Array | np.ndarray | list[Any]) -> pa.Array:
    if isinstance(values, pa.Array):
        return values
    try:
        return pa.array(values, SCHEMA.field(name).type)
    except (pa.ArrowException, TypeError, OverflowError, UnicodeError) as error:
        raise ReplayBufferError(f"column {name} cannot hold {list(values)[:8]!r}: {error}") from error
