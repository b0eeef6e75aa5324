"""Groups for the buffer's tests."""

from __future__ import annotations

import dataclasses

import numpy as np
import xxhash

from asyncrl.buffer.schema import encode_group
from asyncrl.buffer.store import GroupStore
from asyncrl.types import Group, Rollout


def make_rollout(rng: np.random.Generator, *, length: int, version: int = 0) -> Rollout:
    return Rollout(
        response=rng.integers(0, 150_000, length, dtype=np.int32),
        loss_mask=np.ones(length, dtype=np.bool_),
        behaviour_logprobs=-rng.random(length, dtype=np.float32),
        policy_versions=np.full(length, version, dtype=np.int32),
        reward=float(rng.integers(0, 2)),
        finish_reason="stop",
        seconds=0.25,
    )


def make_group(number: int, *, version: int = 0, num_rollouts: int = 2, length: int = 4) -> Group:
    """A small group; the same number gives the same group, id included."""
    rng = np.random.default_rng(number)
    return Group(
        group_id=rng.bytes(16),
        number=number,
        prompt_id=f"prompts.jsonl:{number}",
        prompt_tokens=rng.integers(0, 150_000, 3, dtype=np.int32),
        rollouts=tuple(make_rollout(rng, length=length + i, version=version) for i in range(num_rollouts)),
        generator="generator-0",
        created_at=1_764_560_000.123456,
    )


def assert_same_group(found: Group, expected: Group) -> None:
    """Exact equality, arrays with their dtypes, NaN equal to NaN."""
    assert_same_fields(found, expected, skip="rollouts")
    assert len(found.rollouts) == len(expected.rollouts)
    for a, b in zip(found.rollouts, expected.rollouts, strict=True):
        assert_same_fields(a, b)


def assert_same_fields(found: object, expected: object, *, skip: str = "") -> None:
    for field in dataclasses.fields(expected):  # type: ignore[arg-type]
        a, b = getattr(found, field.name), getattr(expected, field.name)
        if field.name == skip:
            continue
        if isinstance(b, np.ndarray):
            assert a.dtype == b.dtype, field.name
            np.testing.assert_array_equal(a, b, err_msg=field.name)
        else:
            assert a == b or (a != a and b != b), field.name


def lease_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def put(
    store: GroupStore, number: int = 0, *, group: Group | None = None, full_ok: bool = False, **make
) -> bytes | None:
    """Append a new group; its id, empty when the shard is full and that is expected."""
    encoded = encode_group(make_group(number, **make) if group is None else group)
    stored = store.append_message(encoded.message, checksum=xxhash.xxh3_64_intdigest(encoded.message))
    assert stored or (full_ok and stored is None)
    return encoded.ref.group_id if stored else b""


def offered(store: GroupStore, num: int, *, policy_version: int = 0, max_staleness: int = 0, **sampling) -> list[int]:
    """Numbers of the groups that the store offers."""
    offers = store.offer(num, policy_version=policy_version, max_staleness=max_staleness, **sampling)
    return [ref.number for _, ref in offers]
