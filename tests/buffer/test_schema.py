from __future__ import annotations

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pytest

from asyncrl.buffer.schema import (
    SCHEMA,
    VERSION_KEY,
    check_schema,
    decode_group,
    describe,
    encode_group,
    encode_groups,
    groups_to_batch,
    read_batch,
)
from asyncrl.errors import ReplayBufferError
from tests.buffer.groups import assert_same_group, make_group, make_rollout


def replace_rollout(group, index, **changes):
    rollouts = list(group.rollouts)
    rollouts[index] = dataclasses.replace(rollouts[index], **changes)
    return dataclasses.replace(group, rollouts=tuple(rollouts))


def one(group) -> pa.RecordBatch:
    return groups_to_batch([group])


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
    found = decode_group(encode_group(group).message)
    assert_same_group(found, group)
    assert found.min_version == 2
    assert not found.rollouts[0].response.flags.writeable


def test_rows_hold_prompt_and_response_and_null_for_a_failed_reward():
    group = replace_rollout(make_group(7, version=4), 1, reward=float("nan"), error="timeout", finish_reason="error")
    rows = one(group).to_pylist()
    assert [row["group_index"] for row in rows] == [0, 1]
    assert rows[0]["tokens"] == [*group.prompt_tokens.tolist(), *group.rollouts[0].response.tolist()]
    assert (rows[0]["prompt_length"], len(rows[0]["loss_mask"]), rows[0]["min_version"]) == (3, 4, 4)
    assert [row["reward"] for row in rows] == [group.rollouts[0].reward, None]
    assert [row["extra"] for row in rows] == [None, json.dumps({"error": "timeout"})]
    assert len({row["trajectory_id"] for row in rows}) == 2


def test_an_empty_response_survives():
    empty = make_rollout(np.random.default_rng(0), length=0)
    group = make_group(1, version=7)
    group = dataclasses.replace(group, rollouts=(*group.rollouts, empty))
    encoded = encode_group(group)
    assert_same_group(decode_group(encoded.message), group)
    assert encoded.ref.min_version == describe(read_batch(encoded.message), encoded.message.size).min_version == 7


def test_describe_gives_the_index_entry_that_the_writer_made():
    group = replace_rollout(make_group(11, version=6, num_rollouts=3, length=10), 1, reward=float("nan"))
    ref = describe(one(group), 123)
    assert (ref.group_id, ref.number, ref.num_rows, ref.nbytes) == (group.group_id, 11, 3, 123)
    assert (ref.num_tokens, ref.max_tokens, ref.min_version, ref.max_version) == (3 * 3 + 10 + 11 + 12, 3 + 12, 6, 6)
    assert (ref.num_tokens, ref.min_version) == (group.num_tokens, group.min_version)
    rewards = [group.rollouts[0].reward, group.rollouts[2].reward]
    assert (ref.reward_mean, ref.reward_std) == (np.mean(rewards), np.std(rewards))
    encoded = encode_group(group)
    assert encoded.ref == describe(read_batch(encoded.message), encoded.message.size)


def test_versions_are_those_of_the_sampled_tokens():
    mixed = replace_rollout(
        make_group(0, version=5),
        1,
        loss_mask=np.array([True, False, True, True, False]),
        policy_versions=np.array([4, -1, 7, 6, -1], np.int32),
    )
    ref = encode_group(mixed).ref
    assert (ref.min_version, ref.max_version) == (4, 7)
    unsampled = dataclasses.replace(
        make_rollout(np.random.default_rng(0), length=2),
        loss_mask=np.zeros(2, np.bool_),
        policy_versions=np.full(2, -1, np.int32),
    )
    assert encode_group(dataclasses.replace(mixed, rollouts=(unsampled,))).ref.min_version == -1


def test_several_groups_at_once_are_encoded_as_each_alone():
    groups = [make_group(n, version=n % 3, num_rollouts=1 + n % 4, length=3 * n) for n in range(9)]
    for found, group in zip(encode_groups(groups), groups, strict=True):
        assert_same_group(decode_group(found.message), group)
        assert dataclasses.replace(found.ref, nbytes=0) == dataclasses.replace(encode_group(group).ref, nbytes=0)
        assert found.ref.nbytes == found.message.size
    assert encode_groups([]) == []


def test_one_malformed_group_among_several_is_named():
    with pytest.raises(ReplayBufferError, match="group 2, rollout 1: loss_mask has 1 values for 5 response tokens"):
        encode_groups([make_group(1), replace_rollout(make_group(2), 1, loss_mask=np.ones(1, np.bool_))])


def test_another_schema_is_refused_by_name_version_or_column():
    with pytest.raises(ReplayBufferError, match=r"x.arrow: not a trajectory schema.*its columns are a"):
        check_schema(pa.schema({"a": pa.int8()}), what="x.arrow")
    with pytest.raises(ReplayBufferError, match=r"schema version '1'.*reads version 2"):
        check_schema(SCHEMA.with_metadata({VERSION_KEY: b"1"}))
    with pytest.raises(ReplayBufferError, match=r"missing \['extra'\], unknown \['more'\]"):
        check_schema(pa.schema([*list(SCHEMA)[:-1], pa.field("more", pa.int8())], metadata=SCHEMA.metadata))
    with pytest.raises(ReplayBufferError, match="column reward is double"):
        check_schema(SCHEMA.set(SCHEMA.get_field_index("reward"), pa.field("reward", pa.float64())))
    with pytest.raises(ReplayBufferError, match="another order"):
        check_schema(pa.schema(list(SCHEMA)[::-1], metadata=SCHEMA.metadata))
    check_schema(SCHEMA)


def test_what_is_not_a_record_batch_message_is_refused():
    message = encode_group(make_group(0)).message.to_pybytes()
    stream = pa.BufferOutputStream()
    pa.ipc.new_stream(stream, SCHEMA).close()
    for payload in (b"", b"garbage", bytes(100), message[:500], stream.getvalue()):
        with pytest.raises(ReplayBufferError, match="not an Arrow record batch message"):
            read_batch(payload)


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
        (lambda b: with_column(b, "finish_reason", ["stop", "bored"]), "finish_reason must be one of"),
        (
            lambda b: with_column(b, "behaviour_logprobs", [[-1.0] * 4, [-1.0, -1.0, float("nan"), -1.0, -1.0]]),
            "rollout 1: behaviour_logprobs holds nan",
        ),
    ],
)
def test_a_batch_that_is_not_one_whole_group_is_refused(spoil, match: str):
    with pytest.raises(ReplayBufferError, match=match):
        describe(spoil(one(make_group(0))), 1)


def with_column(batch: pa.RecordBatch, name: str, values: list) -> pa.RecordBatch:
    field = SCHEMA.field(name)
    return batch.set_column(SCHEMA.get_field_index(name), field, pa.array(values, field.type))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"loss_mask": np.ones(3, dtype=np.bool_)}, "group 0, rollout 0: loss_mask has 3 values for 4 response tokens"),
        ({"response": np.ones(4)}, "response must be one-dimensional int32; got float64"),
        ({"policy_versions": np.ones((4, 1), dtype=np.int32)}, "policy_versions must be one-dimensional"),
        ({"finish_reason": "bored"}, "finish_reason must be one of stop, length"),
        ({"reward_parts": {"a": "b"}}, "column reward_parts cannot hold"),
        ({"reward": "good"}, "column reward cannot hold"),
        (
            {"behaviour_logprobs": np.array([0, -1, -np.inf, np.nan], np.float32)},
            "group 0, rollout 0: behaviour_logprobs holds -inf; logprobs must be finite",
        ),
    ],
)
def test_a_malformed_rollout_is_refused_by_the_writer(changes: dict, match: str):
    with pytest.raises(ReplayBufferError, match=match):
        encode_group(replace_rollout(make_group(0), 0, **changes))


def test_a_group_without_rollouts_or_with_a_short_id_is_refused():
    for changes in ({"rollouts": ()}, {"group_id": b"short"}):
        with pytest.raises(ReplayBufferError, match="16 bytes"):
            encode_group(dataclasses.replace(make_group(0), **changes))
