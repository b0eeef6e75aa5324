from __future__ import annotations

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pytest

from asyncrl.buffer.schema import SCHEMA, VERSION_KEY, decode_group, describe, encode_group, group_to_batch, read_batch
from asyncrl.errors import ReplayBufferError
from tests.buffer.groups import assert_same_group, make_group, make_rollout


def replace_rollout(group, index, **changes):
    rollouts = list(group.rollouts)
    rollouts[index] = dataclasses.replace(rollouts[index], **changes)
    return dataclasses.replace(group, rollouts=tuple(rollouts))


def ipc_bytes(*batches: pa.RecordBatch, schema: pa.Schema | None = None) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema or batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def test_round_trip_is_exact():
    rng = np.random.default_rng(0)
    tool = dataclasses.replace(
        make_rollout(rng, length=5, version=3),
        loss_mask=np.array([True, True, False, False, True]),
        policy_versions=np.array([3, 4, -1, -1, 5], dtype=np.int32),
        behaviour_logprobs=np.array([-0.1, -1e-30, 0, 0, -80.0], dtype=np.float32),
        reward=-1.5,
        reward_parts={"format": 0.5, "answer": -2.0},
        finish_reason="length",
    )
    failed = dataclasses.replace(
        make_rollout(rng, length=2, version=2), reward=float("nan"), finish_reason="error", error='said "no"\n'
    )
    unscored = dataclasses.replace(make_rollout(rng, length=1, version=9), reward=float("nan"))
    group = dataclasses.replace(make_group(2**40), rollouts=(tool, failed, unscored))
    found = decode_group(encode_group(group))
    assert_same_group(found, group)
    assert found.min_version == 2
    assert not found.rollouts[0].response.flags.writeable


def test_rows_hold_prompt_and_response_and_null_for_a_failed_reward():
    group = replace_rollout(make_group(7, version=4), 1, reward=float("nan"), error="timeout", finish_reason="error")
    rows = group_to_batch(group).to_pylist()
    assert [row["group_index"] for row in rows] == [0, 1]
    assert rows[0]["tokens"] == [*group.prompt_tokens.tolist(), *group.rollouts[0].response.tolist()]
    assert (rows[0]["prompt_length"], len(rows[0]["loss_mask"]), rows[0]["min_version"]) == (3, 4, 4)
    assert [row["reward"] for row in rows] == [group.rollouts[0].reward, None]
    assert [row["extra"] for row in rows] == [None, json.dumps({"error": "timeout"})]
    assert len({row["trajectory_id"] for row in rows}) == 2


def test_an_empty_response_survives():
    empty = make_rollout(np.random.default_rng(0), length=0)
    group = dataclasses.replace(make_group(1), rollouts=(*make_group(1).rollouts, empty))
    assert_same_group(decode_group(encode_group(group)), group)


def test_describe_gives_the_index_entry():
    group = make_group(11, version=6, num_rollouts=3, length=10)
    ref = describe(group_to_batch(group), 123)
    assert (ref.group_id, ref.number, ref.num_rows, ref.nbytes) == (group.group_id, 11, 3, 123)
    assert (ref.num_tokens, ref.max_tokens, ref.min_version) == (3 * 3 + 10 + 11 + 12, 3 + 12, 6)
    assert (ref.num_tokens, ref.min_version) == (group.num_tokens, group.min_version)


def test_an_unknown_schema_version_is_refused():
    batch = group_to_batch(make_group(0)).replace_schema_metadata({VERSION_KEY: b"2"})
    with pytest.raises(ReplayBufferError, match=r"schema version '2'.*reads version 1"):
        read_batch(ipc_bytes(batch))


@pytest.mark.parametrize("columns", [SCHEMA.names[:-1], SCHEMA.names[::-1]])
def test_other_columns_under_a_known_version_are_refused(columns: list[str]):
    batch = group_to_batch(make_group(0)).select(columns)
    with pytest.raises(ReplayBufferError, match="columns differ"):
        read_batch(ipc_bytes(batch))


def test_a_foreign_stream_and_no_stream_are_refused():
    with pytest.raises(ReplayBufferError, match="not a trajectory schema"):
        read_batch(ipc_bytes(pa.record_batch({"a": [1]})))
    for payload in (b"", b"garbage", bytes(100), encode_group(make_group(0)).to_pybytes()[:500]):
        with pytest.raises(ReplayBufferError):
            read_batch(payload)


def test_a_stream_of_two_groups_is_refused():
    with pytest.raises(ReplayBufferError, match="has 2"):
        read_batch(ipc_bytes(group_to_batch(make_group(0)), group_to_batch(make_group(1))))


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda b: b.slice(0, 1), "not whole"),
        (lambda b: b.slice(1, 1), "not whole"),
        (lambda b: b.take(pa.array([1, 0])), "not whole"),
        (lambda b: b.take(pa.array([], pa.int64())), "one group_id"),
        (lambda b: with_column(b, "number", [1, 2]), "one number"),
        (lambda b: with_column(b, "prompt_length", [99, 99]), "prompt_length 99"),
        (lambda b: with_column(b, "prompt_length", [2, 2]), "loss_mask is not aligned"),
        (lambda b: with_column(b, "policy_versions", [[0], [0]]), "policy_versions is not aligned"),
        (lambda b: with_column(b, "behaviour_logprobs", [[None] * 4, [0.0] * 5]), "nulls in column behaviour_logprobs"),
        (lambda b: with_column(b, "generator", [None, "g"]), "nulls in column generator"),
    ],
)
def test_a_batch_that_is_not_one_whole_group_is_refused(spoil, match: str):
    with pytest.raises(ReplayBufferError, match=match):
        describe(read_batch(ipc_bytes(spoil(group_to_batch(make_group(0))))), 1)


def with_column(batch: pa.RecordBatch, name: str, values: list) -> pa.RecordBatch:
    field = SCHEMA.field(name)
    return batch.set_column(SCHEMA.get_field_index(name), field, pa.array(values, field.type))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"loss_mask": np.ones(3, dtype=np.bool_)}, "loss_mask has 3 values for 4 response tokens"),
        ({"response": np.ones(4)}, "response must be one-dimensional int32; got float64"),
        ({"policy_versions": np.ones((4, 1), dtype=np.int32)}, "policy_versions must be one-dimensional"),
        ({"finish_reason": "bored"}, "finish_reason must be one of stop, length"),
        ({"reward_parts": {"a": "b"}}, "column reward_parts cannot hold"),
    ],
)
def test_a_malformed_rollout_is_refused_by_the_writer(changes: dict, match: str):
    with pytest.raises(ReplayBufferError, match=match):
        encode_group(replace_rollout(make_group(0), 0, **changes))


def test_a_group_without_rollouts_or_with_a_short_id_is_refused():
    for changes in ({"rollouts": ()}, {"group_id": b"short"}):
        with pytest.raises(ReplayBufferError, match="16 bytes"):
            encode_group(dataclasses.replace(make_group(0), **changes))
