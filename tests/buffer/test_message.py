"""The messages that are put together by hand against those that pyarrow writes of the same rows."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.buffer.columns import read_columns
from asyncrl.buffer.schema import SCHEMA, decode_group, describe, encode_group, read_batch
from asyncrl.buffer.segments import metadata_length
from asyncrl.errors import ReplayBufferError
from asyncrl.types import FINISH_REASONS, Group, Rollout
from tests.buffer.groups import assert_same_fields, assert_same_group

int32 = st.integers(-(2**31), 2**31 - 1)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    length = draw(st.integers(0, 40))

    def array(values: st.SearchStrategy, dtype: type) -> np.ndarray:
        return np.array(draw(st.lists(values, min_size=length, max_size=length)), dtype)

    return Rollout(
        response=array(int32, np.int32),
        loss_mask=array(st.booleans(), np.bool_),
        behaviour_logprobs=array(finite, np.float32),
        policy_versions=array(st.integers(-1, 5), np.int32),
        reward=draw(finite | st.just(float("nan"))),
        finish_reason=draw(st.sampled_from(FINISH_REASONS)),
        seconds=draw(st.floats(allow_nan=False)),
        reward_parts=draw(st.dictionaries(text, finite, max_size=3)),
        error=draw(st.none() | text),
    )


groups = st.builds(
    Group,
    group_id=st.binary(min_size=16, max_size=16),
    number=st.integers(-(2**63), 2**63 - 1),
    prompt_id=text,
    prompt_tokens=st.lists(int32, max_size=9).map(lambda values: np.array(values, np.int32)),
    rollouts=st.lists(rollouts(), min_size=1, max_size=18).map(tuple),
    generator=text,
    created_at=st.floats(allow_nan=False),
)


def rows(group: Group) -> list[dict]:
    sampled = [r.policy_versions[r.loss_mask] for r in group.rollouts]
    return [
        {
            "trajectory_id": xxhash.xxh3_128_digest(group.group_id + index.to_bytes(2, "little")),
            "group_id": group.group_id,
            "number": group.number,
            "prompt_id": group.prompt_id,
            "group_size": len(group.rollouts),
            "group_index": index,
            "tokens": np.concatenate([group.prompt_tokens, r.response]),
            "prompt_length": group.prompt_tokens.size,
            "loss_mask": r.loss_mask,
            "behaviour_logprobs": r.behaviour_logprobs,
            "policy_versions": r.policy_versions,
            "min_version": sampled[index].min(initial=2**31 - 1) if sampled[index].size else -1,
            "reward": None if np.isnan(r.reward) else r.reward,
            "reward_parts": list(r.reward_parts.items()),
            "token_rewards": None,
            "finish_reason": r.finish_reason,
            "generator": group.generator,
            "created_at": group.created_at,
            "seconds": r.seconds,
            "extra": None if r.error is None else json.dumps({"error": r.error}),
        }
        for index, r in enumerate(group.rollouts)
    ]


@settings(max_examples=150, deadline=None)
@given(groups)
def test_a_message_holds_the_rows_that_pyarrow_writes(group: Group):
    encoded = encode_group(group)
    batch = read_batch(encoded.message)
    batch.validate(full=True)
    expected = pa.RecordBatch.from_pylist(rows(group), SCHEMA)
    assert batch.equals(expected)
    assert_same_fields(describe(batch, encoded.message.size), encoded.ref)
    assert_same_group(decode_group(encoded.message), group)
    assert_same_group(decode_group(expected.serialize()), group)  # in pyarrow's own layout


@settings(max_examples=60, deadline=None)
@given(st.lists(groups, max_size=4))
def test_columns_hold_what_the_groups_hold(many: list[Group]):
    columns = read_columns([encode_group(group).message for group in many])
    trajectories = [(group, r) for group in many for r in group.rollouts]
    assert columns.group_offsets.tolist() == np.cumsum([0, *(len(group.rollouts) for group in many)]).tolist()
    assert columns.min_versions.tolist() == [r.min_version for _, r in trajectories]
    assert len(columns.token_offsets) == len(columns.response_offsets) == len(trajectories) + 1
    for i, (group, rollout) in enumerate(trajectories):
        tokens = columns.tokens[columns.token_offsets[i] : columns.token_offsets[i + 1]]
        response = slice(columns.response_offsets[i], columns.response_offsets[i + 1])
        assert_same_fields(
            Rollout(
                response=tokens[columns.prompt_lengths[i] :],
                loss_mask=columns.loss_mask[response],
                behaviour_logprobs=columns.behaviour_logprobs[response],
                policy_versions=columns.policy_versions[response],
                reward=float(columns.rewards[i]),
                finish_reason="stop",
                seconds=0.0,
            ),
            dataclasses.replace(rollout, finish_reason="stop", seconds=0.0, reward_parts={}, error=None),
        )
        np.testing.assert_array_equal(tokens[: columns.prompt_lengths[i]], group.prompt_tokens)


def test_columns_of_something_else_are_refused():
    for message in (b"", b"garbage", bytes(100), SCHEMA.serialize().to_pybytes()):
        with pytest.raises(ReplayBufferError, match="not an Arrow record batch message"):
            read_columns([message])


@settings(max_examples=20, deadline=None)
@given(st.lists(groups, min_size=1, max_size=4))
def test_messages_in_a_stream_are_read_by_pyarrow(many: list[Group]):
    messages = [encode_group(group).message for group in many]
    assert all(metadata_length(message) % 8 == 0 == message.size % 8 for message in messages)
    data = b"".join(message.to_pybytes() for message in (SCHEMA.serialize(), *messages))
    found = pa.ipc.open_stream(data).read_all()
    assert found.equals(pa.Table.from_pylist([row for group in many for row in rows(group)], SCHEMA))
