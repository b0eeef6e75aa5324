from __future__ import annotations

import pytest

import asyncrl.buffer.store as store_module
from asyncrl.buffer.schema import encode_group
from asyncrl.buffer.store import GroupStore
from asyncrl.buffer.wire import checksum
from asyncrl.errors import ReplayBufferError
from asyncrl.types import GroupRef
from tests.buffer.groups import make_group

NOW = {"policy_version": 0, "max_staleness": 0}


def put(store: GroupStore, number: int, *, version: int = 0) -> bytes:
    group = make_group(number, version=version)
    payload = encode_group(group).to_pybytes()
    assert store.append(payload, checksum=checksum(payload))
    return group.group_id


def numbers(refs: list[GroupRef]) -> list[int]:
    return [ref.number for ref in refs]


def test_an_append_is_stored_once_whatever_became_of_it():
    store = GroupStore()
    payload = encode_group(make_group(1)).to_pybytes()
    assert store.append(payload, checksum=checksum(payload))
    group_id = store.peek(1, **NOW)[0].group_id
    again = []
    again.append(store.append(payload, checksum=checksum(payload)))
    store.lease("a", [group_id], **NOW)
    again.append(store.append(payload, checksum=checksum(payload)))
    store.commit("a")
    again.append(store.append(payload, checksum=checksum(payload)))
    assert again == [False, False, False]
    assert (store.stats().appended, store.stats().groups, store.held_bytes) == (1, 0, 0)


def test_the_ids_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_module, "NUM_REMEMBERED_IDS", 2)
    store = GroupStore()
    ids = [put(store, n) for n in range(4)]
    store.lease("a", ids, **NOW)
    store.commit("a")
    assert list(store._gone) == ids[2:]


def test_peek_orders_by_number_not_by_arrival():
    store = GroupStore()
    for number in (5, 1, 9, 3):
        put(store, number)
    assert numbers(store.peek(3, **NOW)) == [1, 3, 5]
    assert numbers(store.peek(99, **NOW)) == [1, 3, 5, 9]
    assert store.peek(-1, **NOW) == []


def test_leased_groups_are_nobody_elses_until_released():
    store = GroupStore()
    ids = [put(store, n) for n in range(3)]
    assert store.lease("a", ids[:2], **NOW)
    assert store.lease("a", ids[:2], **NOW)  # repeated
    assert not store.lease("a", ids[2:], **NOW)  # the same id for something else
    assert not store.lease("b", ids[1:], **NOW)  # all or nothing
    assert numbers(store.peek(9, **NOW)) == [2]
    assert store.release("a") == 2 and store.release("a") == 0
    assert numbers(store.peek(9, **NOW)) == [0, 1, 2]


def test_a_lease_of_an_unknown_or_doubled_group_is_refused():
    store = GroupStore()
    group_id = put(store, 0)
    assert not store.lease("a", [bytes(16)], **NOW)
    assert not store.lease("a", [group_id, group_id], **NOW)
    assert store.stats().leased_groups == 0


def test_commit_removes_for_good_and_may_be_repeated():
    store = GroupStore()
    ids = [put(store, n) for n in range(3)]
    store.lease("a", ids[:2], **NOW)
    assert (store.commit("a"), store.commit("a"), store.commit("never"), store.release("a")) == (2, 0, 0, 0)
    stats = store.stats()
    assert (stats.appended, stats.groups, stats.leased_groups, stats.committed) == (3, 1, 0, 2)
    with pytest.raises(ReplayBufferError, match="was committed or evicted"):
        store.read(ids[0])


def test_stale_groups_are_evicted_and_counted_but_not_leased_ones():
    store = GroupStore()
    ids = [put(store, n, version=n) for n in range(4)]
    store.lease("a", ids[:1], **NOW)
    assert numbers(store.evict(policy_version=4, max_staleness=2)) == [1]
    assert store.stats().evicted == 1
    store.release("a")
    assert not store.lease("b", ids[:1], policy_version=4, max_staleness=2)  # too stale by now
    assert numbers(store.peek(9, policy_version=4, max_staleness=2)) == [2, 3]
    assert store.stats().evicted == 2


def test_stats_describe_free_and_leased_groups():
    store = GroupStore()
    ids = [put(store, n) for n in range(2)]
    nbytes = [len(encode_group(make_group(n))) for n in range(2)]
    store.lease("a", ids[:1], **NOW)
    stats = store.stats()
    assert (stats.groups, stats.rows, stats.tokens) == (1, 2, make_group(1).num_tokens)
    assert (stats.bytes, stats.leased_groups, stats.leased_bytes) == (nbytes[1], 1, nbytes[0])


def test_corruption_is_detected_on_append_and_on_read():
    store = GroupStore()
    payload = bytearray(encode_group(make_group(0)).to_pybytes())
    with pytest.raises(ReplayBufferError, match="to append is corrupted"):
        store.append(payload, checksum="0" * 16)
    assert store.append(payload, checksum=checksum(payload))
    group_id = make_group(0).group_id
    assert store.read(group_id).payload == payload
    payload[len(payload) // 2] ^= 1
    with pytest.raises(ReplayBufferError, match=f"group {group_id.hex()}.* is corrupted"):
        store.read(group_id)
