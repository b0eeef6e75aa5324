from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow as pa
import pytest
import xxhash

import asyncrl.buffer.store as store_module
from asyncrl.buffer.log import ShardLog
from asyncrl.buffer.records import RECORD_BYTES
from asyncrl.buffer.sampling import Sampling
from asyncrl.buffer.schema import SCHEMA, decode_group, encode_group
from asyncrl.buffer.segment_table import StoreSettings
from asyncrl.buffer.store import GroupStore
from asyncrl.errors import ReplayBufferError
from tests.buffer.groups import assert_same_group, lease_id, make_group, offered, put

NOW = {"policy_version": 0, "max_staleness": 0}
A, B = lease_id(1), lease_id(2)


@pytest.fixture
def store(tmp_path: Path) -> GroupStore:
    return GroupStore(tmp_path / "shard")


def reopened(store: GroupStore, **settings) -> GroupStore:
    """The same directory in another process: nothing was closed."""
    return GroupStore(store.directory, StoreSettings(**settings))


def test_an_append_is_stored_once_whatever_became_of_it(store: GroupStore):
    group_id = put(store, 1)
    message = encode_group(make_group(1)).message
    checksum = xxhash.xxh3_64_intdigest(message)
    again = [store.append_message(message, checksum=checksum)]
    store.lease(A, [group_id], **NOW)
    again.append(store.append_message(message, checksum=checksum))
    store.commit(A, [group_id])
    again.append(store.append_message(message, checksum=checksum))
    assert again == [False, False, False]
    assert (store.stats().appended, store.stats().groups, store.group_bytes) == (1, 0, 0)


def test_the_ids_that_are_remembered_are_bounded(store: GroupStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_module, "NUM_REMEMBERED_IDS", 2)
    ids = [put(store, n) for n in range(4)]
    store.lease(A, ids, **NOW)
    store.commit(A, ids)
    assert [store.knows(i) for i in ids] == [False, False, True, True]


def test_fifo_orders_by_number_not_by_arrival(store: GroupStore):
    for number in (5, 1, 9, 3):
        put(store, number)
    assert offered(store, 3) == [1, 3, 5]
    assert offered(store, 99) == [1, 3, 5, 9]
    assert offered(store, -1) == []


def test_leased_groups_are_nobody_elses_until_released(store: GroupStore):
    ids = [put(store, n) for n in range(3)]
    assert store.lease(A, ids[:2], **NOW)
    assert store.lease(A, ids[:2], **NOW)  # repeated
    assert not store.lease(A, ids[2:], **NOW)  # the same id for something else
    assert not store.lease(B, ids[1:], **NOW)  # all or nothing
    assert offered(store, 9) == [2]
    assert store.release(A) == 2 and store.release(A) == 0
    assert offered(store, 9) == [0, 1, 2]


def test_a_lease_of_an_unknown_or_doubled_group_is_refused(store: GroupStore):
    group_id = put(store, 0)
    assert not store.lease(A, [bytes(16)], **NOW)
    assert not store.lease(A, [group_id, group_id], **NOW)
    assert store.stats().leased_groups == 0


def test_commit_removes_for_good_and_may_be_repeated(store: GroupStore):
    ids = [put(store, n) for n in range(3)]
    store.lease(A, ids[:2], **NOW)
    assert (store.commit(A, ids[:2]), store.commit(A, ids[:2]), store.release(A)) == (2, 0, 0)
    stats = store.stats()
    assert (stats.appended, stats.groups, stats.leased_groups, stats.committed, stats.uses) == (3, 1, 0, 2, 2)
    with pytest.raises(ReplayBufferError, match="is gone: committed"):
        store.read(ids[0])


def test_stale_groups_are_evicted_and_counted_but_not_leased_ones(store: GroupStore):
    ids = [put(store, n, version=n) for n in range(4)]
    assert store.lease(A, ids[:1], policy_version=3, max_staleness=3)
    assert [ref.number for ref in store.evict(policy_version=4, max_staleness=2)] == [1]
    store.release(A)
    assert not store.lease(B, ids[:1], policy_version=4, max_staleness=2)  # too stale by now
    assert offered(store, 9, policy_version=4, max_staleness=2) == [2, 3]
    stats = store.stats()
    assert (stats.evicted, stats.evicted_rows) == (2, 4)
    assert stats.evicted_tokens == sum(make_group(n).num_tokens for n in (0, 1))


def test_what_was_dropped_and_kept_is_summed_so_that_a_bias_shows(store: GroupStore):
    ids = [put(store, n, version=n) for n in range(4)]
    refs = {n: encode_group(make_group(n, version=n)).ref for n in range(4)}
    store.lease(A, ids[2:], policy_version=3, max_staleness=3)
    store.commit(A, ids[2:])
    store.evict(policy_version=3, max_staleness=1)
    stats = store.stats()
    assert stats.committed_reward == sum(refs[n].reward_mean for n in (2, 3))
    assert stats.evicted_reward == sum(refs[n].reward_mean for n in (0, 1))
    assert stats.committed_tokens == sum(refs[n].num_tokens for n in (2, 3))
    assert (stats.committed_rows, stats.evicted_rows) == (4, 4)


def test_stats_describe_free_and_leased_groups(store: GroupStore):
    ids = [put(store, n) for n in range(2)]
    nbytes = [encode_group(make_group(n)).ref.nbytes for n in range(2)]
    store.lease(A, ids[:1], **NOW)
    stats = store.stats()
    assert (stats.groups, stats.rows, stats.tokens) == (1, 2, make_group(1).num_tokens)
    assert (stats.bytes, stats.leased_groups, stats.leased_bytes) == (nbytes[1], 1, nbytes[0])


def test_a_version_from_the_future_is_refused(store: GroupStore):
    put(store, 0, version=7)  # as long as nobody told the version, any will do
    store.evict(policy_version=8, max_staleness=2)
    put(store, 1, version=8)
    with pytest.raises(ReplayBufferError, match="group 2 has tokens of policy version 9; the newest is 8"):
        put(store, 2, version=9)


# Leases that run out


def test_a_lease_runs_out_unless_it_is_renewed(tmp_path: Path):
    clock = [0.0]
    store = GroupStore(tmp_path, now=lambda: clock[0])
    ids = [put(store, n) for n in range(2)]
    store.lease(A, ids[:1], **NOW, timeout_s=10)
    store.lease(B, ids[1:], **NOW, timeout_s=10)
    clock[0] = 8.0
    assert store.renew(A)
    clock[0] = 12.0
    assert store.expire_leases() == 1
    assert offered(store, 9) == [1]
    assert not store.renew(B)
    clock[0] = 100.0
    assert offered(store, 9) == [0, 1]


def test_a_commit_after_the_lease_ran_out_still_counts_if_nobody_else_has_the_groups(tmp_path: Path):
    clock = [0.0]
    store = GroupStore(tmp_path, now=lambda: clock[0])
    ids = [put(store, n) for n in range(2)]
    store.lease(A, ids, **NOW, timeout_s=1)
    clock[0] = 2.0
    store.lease(B, ids[1:], **NOW, timeout_s=1)
    with pytest.raises(ReplayBufferError, match=f"ran out before its commit, and 1 of its groups.*{ids[1].hex()}"):
        store.commit(A, ids)
    stats = store.stats()
    assert (stats.committed, stats.leased_groups, stats.groups) == (1, 1, 0)
    assert store.commit(B, ids[1:]) == 1
    with pytest.raises(ReplayBufferError, match="ran out"):
        store.commit(A, ids)  # it was trained on twice, and that is said again


# Replay


def test_replayed_groups_leave_after_max_uses(store: GroupStore):
    ids = [put(store, n) for n in range(2)]
    for use in range(3):
        lease = lease_id(10 + use)
        assert store.lease(lease, ids, **NOW)
        assert store.commit(lease, ids, max_uses=3) == 2
        assert store.commit(lease, ids, max_uses=3) == 0  # repeated
        assert store.stats().uses == 2 * (use + 1)
        assert len(offered(store, 9)) == (2 if use < 2 else 0)
    assert store.stats().committed == 2 and store.stats().is_balanced


@pytest.mark.parametrize("order", ["freshest", "uniform", "prioritized"])
def test_orders_take_whole_free_groups_once_and_repeat_under_a_seed(store: GroupStore, order):
    for number in range(30):
        put(store, number, version=number % 4)
    bound = {"policy_version": 3, "max_staleness": 2}
    draw = offered(store, 10, **bound, sampling=Sampling(order, seed=5), draw="1")
    assert len(set(draw)) == 10 and all(number % 4 != 0 for number in draw)
    assert draw == offered(store, 10, **bound, sampling=Sampling(order, seed=5), draw="1")
    if order == "freshest":
        assert draw == [27, 23, 19, 15, 11, 7, 3, 30 - 4, 22, 18]
    else:
        assert draw != offered(store, 10, **bound, sampling=Sampling(order, seed=6), draw="1")
        assert draw != offered(store, 10, **bound, sampling=Sampling(order, seed=5), draw="2")
    assert sorted(offered(store, 99, **bound, sampling=Sampling(order), draw="")) == sorted(offered(store, 99, **bound))


def test_uniform_is_uniform_and_prioritized_follows_the_spread_of_rewards(tmp_path: Path):
    store = GroupStore(tmp_path)
    rewards = {0: (0.0, 0.0), 1: (0.0, 0.2), 2: (0.0, 0.6)}  # std 0, 0.1, 0.3
    for number, values in rewards.items():
        group = make_group(number)
        rollouts = tuple(dataclasses.replace(r, reward=v) for r, v in zip(group.rollouts, values, strict=True))
        put(store, group=dataclasses.replace(group, rollouts=rollouts))
    counts = {order: [0, 0, 0] for order in ("uniform", "prioritized")}
    for order, count in counts.items():
        for draw in range(3000):
            count[offered(store, 1, sampling=Sampling(order), draw=str(draw))[0]] += 1
    assert all(abs(n / 3000 - 1 / 3) < 0.04 for n in counts["uniform"])
    assert abs(counts["prioritized"][2] / counts["prioritized"][1] - 3) < 0.5
    assert counts["prioritized"][0] < 40


def test_sampling_that_makes_no_sense_is_refused():
    for arguments, match in [
        ({"order": "best"}, "one of fifo, freshest"),
        ({"max_uses": 0}, "at least 1"),
        ({"order": "freshest", "max_uses": 2}, "freshest takes each group once"),
    ]:
        with pytest.raises(ReplayBufferError, match=match):
            Sampling(**arguments)


# Files


def test_sealed_segments_are_arrow_files_of_the_trajectories(tmp_path: Path):
    store = GroupStore(tmp_path / "s", StoreSettings(segment_bytes=20_000))
    for number in range(12):
        put(store, number, length=200)
    store.close()
    files = sorted((tmp_path / "s").glob("*.arrow"))
    assert len(files) > 2
    table = pa.concat_tables(pa.ipc.open_file(pa.memory_map(str(f))).read_all() for f in files)
    assert table.schema.equals(SCHEMA, check_metadata=True)
    table.validate(full=True)
    assert table["number"].to_pylist() == [n for n in range(12) for _ in range(2)]
    assert table["tokens"].to_pylist()[6] == [
        *make_group(3, length=200).prompt_tokens.tolist(),
        *make_group(3, length=200).rollouts[0].response.tolist(),
    ]


def test_another_process_continues_from_the_files(store: GroupStore):
    ids = [put(store, n, version=n // 3) for n in range(9)]
    store.lease(A, ids[3:5], policy_version=3, max_staleness=2)
    store.lease(B, ids[5:7], policy_version=3, max_staleness=2)
    store.commit(B, ids[5:7])
    other = reopened(store)
    assert dataclasses.replace(other.stats(), held_bytes=0) == dataclasses.replace(store.stats(), held_bytes=0)
    assert other.policy_version == 3
    assert [other.knows(i) for i in ids] == [True] * 9
    assert other.commit(A, ids[3:5]) == 2
    assert_same_group(decode_group(other.read(ids[8])), make_group(8, version=2))
    put(other, 20)
    assert reopened(other).stats().groups == 6


def test_a_compacted_log_leads_to_the_same_state(store: GroupStore, monkeypatch: pytest.MonkeyPatch):
    ids = [put(store, n) for n in range(40)]
    store.lease(A, ids[:3], **NOW)
    for round_ in range(3):
        store.lease(lease_id(round_ + 5), ids[30:], **NOW)
        store.commit(lease_id(round_ + 5), ids[30:], max_uses=5)
    store.lease(B, ids[3:20], **NOW)
    before = store._log.num_records
    monkeypatch.setattr("asyncrl.buffer.log.COMPACT_FROM", 1)
    store.commit(B, ids[3:20])
    store.compact_if_long()
    assert store._log.num_records < before
    other = reopened(store)
    assert dataclasses.replace(other.stats(), held_bytes=0) == dataclasses.replace(store.stats(), held_bytes=0)
    assert [other.commit(lease_id(round_ + 5), ids[30:], max_uses=5) for round_ in (2,)] == [0]
    assert other.commit(A, ids[:3]) == 3
    assert_same_group(decode_group(other.read(ids[25])), make_group(25))


@pytest.mark.parametrize("cut", [1, RECORD_BYTES - 1])
def test_a_torn_end_of_the_log_is_cut_off(store: GroupStore, cut: int):
    put(store, 0)
    size = store._log.num_records * RECORD_BYTES
    put(store, 1)
    data = (store.directory / "log").read_bytes()
    (store.directory / "log").write_bytes(data[: size + cut])
    other = reopened(store)
    assert other.stats().groups == 1
    put(other, 1)
    assert reopened(other).stats().groups == 2


def test_a_damaged_log_is_an_error_that_names_the_record(store: GroupStore):
    put(store, 0)
    put(store, 1)
    data = bytearray((store.directory / "log").read_bytes())
    data[RECORD_BYTES + 40] ^= 1
    (store.directory / "log").write_bytes(data)
    with pytest.raises(ReplayBufferError, match=r"log, record 1: .*damaged"):
        reopened(store)


def test_a_flipped_bit_is_found_on_read_and_quarantined(store: GroupStore):
    ids = [put(store, n, length=100) for n in range(3)]
    entry, path = store.locate(ids[1])
    with open(path, "r+b") as file:
        file.seek(entry.offset + entry.ref.nbytes - 100)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    assert [store.quarantine(i) for i in (ids[0], ids[2])] == [False, False]
    with pytest.raises(ReplayBufferError, match=f"group 1 .{ids[1].hex()}. is corrupted in {path}.*it was given up"):
        store.read(ids[1])
    stats = store.stats()
    assert (stats.quarantined, stats.groups, stats.is_balanced) == (1, 2, True)
    assert reopened(store).stats().quarantined == 1
    with pytest.raises(ReplayBufferError, match="quarantined"):
        store.read(ids[1])


def test_segments_are_recycled_and_memory_stays_flat(tmp_path: Path):
    store = GroupStore(tmp_path / "s", StoreSettings(segment_bytes=20_000))
    sizes = []
    for number in range(200):
        group_id = put(store, number, length=200)
        store.lease(lease_id(number), [group_id], **NOW)
        store.commit(lease_id(number), [group_id])
        sizes.append(sum(f.stat().st_size for f in (tmp_path / "s").iterdir() if f.name != "log"))
    assert max(sizes[50:]) <= 3 * 20_000 and store.held_bytes <= 3 * 20_000


def test_a_full_shard_takes_no_more_until_some_are_gone(tmp_path: Path):
    store = GroupStore(tmp_path / "s", StoreSettings(segment_bytes=20_000, capacity_bytes=50_000))
    ids = []
    while group_id := put(store, len(ids), length=200, full_ok=True):
        ids.append(group_id)
    assert 20_000 < store.held_bytes <= 50_000 and len(ids) >= 4
    store.lease(A, ids[:2], **NOW)
    store.commit(A, ids[:2])
    assert put(store, 999, length=200, full_ok=True)


def test_memory_over_budget_is_spilled_to_disk_and_still_readable(tmp_path: Path):
    settings = StoreSettings(segment_bytes=20_000, memory_bytes=45_000, spill_dir=tmp_path / "disk")
    store = GroupStore(tmp_path / "s", settings)
    ids = [put(store, n, length=200) for n in range(30)]
    spilled = sorted((tmp_path / "disk").glob("*.arrow"))
    in_memory = [f for f in (tmp_path / "s").iterdir() if f.name != "log" and f.suffix != ".recycled"]
    assert spilled and sum(f.stat().st_size for f in in_memory) < 70_000
    assert pa.ipc.open_file(pa.memory_map(str(spilled[0]))).read_all()["number"][0].as_py() == 0
    for _ in range(2):
        for number, group_id in enumerate(ids):
            assert_same_group(decode_group(store.read(group_id)), make_group(number, length=200))
        store = GroupStore(tmp_path / "s", settings)
    store.lease(A, ids, **NOW)
    store.commit(A, ids)
    assert not list((tmp_path / "disk").glob("*.arrow"))


def test_kept_segments_hold_the_whole_run(tmp_path: Path):
    store = GroupStore(tmp_path / "s", StoreSettings(segment_bytes=20_000, keep=True))
    for number in range(30):
        group_id = put(store, number, length=200)
        store.lease(lease_id(number), [group_id], **NOW)
        store.commit(lease_id(number), [group_id])
    store.close()
    tables = [pa.ipc.open_file(pa.memory_map(str(f))).read_all() for f in sorted((tmp_path / "s").glob("*.arrow"))]
    assert pa.concat_tables(tables)["number"].to_pylist() == [n for n in range(30) for _ in range(2)]


def test_corruption_is_detected_on_append(store: GroupStore):
    with pytest.raises(ReplayBufferError, match="to append is corrupted"):
        store.append_message(encode_group(make_group(0)).message, checksum=0)


def test_a_log_without_room_stores_nothing(store: GroupStore, monkeypatch: pytest.MonkeyPatch):
    put(store, 0)

    def full(self: ShardLog, records: bytes, *, grows: bool = False) -> None:
        raise ReplayBufferError("a buffer segment cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ShardLog, "write", full)
        with pytest.raises(ReplayBufferError, match="No space left"):
            put(store, 1)
    assert store.stats().appended == 1
    put(store, 1)
    assert reopened(store).stats().groups == 2


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def write_as_another_version(folder: Path) -> Path:
    """Give the segments the schema version 1; the first of them."""
    for path in (files := sorted([*folder.glob("*.arrow"), *folder.glob("*.open")])):
        path.write_bytes(path.read_bytes().replace(b"\x01\0\0\x002\0", b"\x01\0\0\x001\0"))
    return files[0]


@pytest.mark.parametrize("closed", [True, False])
def test_a_shard_of_another_schema_version_is_refused_and_left_alone(tmp_path: Path, closed: bool):
    store = GroupStore(tmp_path)
    put(store, 0)
    if closed:
        store.close()
    path = write_as_another_version(tmp_path)
    with open(tmp_path / "log", "ab") as log:
        log.write(b"torn")
    before = files_of(tmp_path)
    with pytest.raises(ReplayBufferError) as caught:
        GroupStore(tmp_path)
    assert all(
        part in str(caught.value)
        for part in (str(path), "schema version 1", "reads version 2", "the asyncrl that wrote it", "an empty folder")
    )
    assert files_of(tmp_path) == before


def test_spilled_segments_of_another_schema_version_are_refused(tmp_path: Path):
    settings = StoreSettings(segment_bytes=20_000, memory_bytes=0, spill_dir=tmp_path / "disk")
    store = GroupStore(tmp_path / "s", settings)
    for number in range(10):
        put(store, number, length=200)
    path = write_as_another_version(tmp_path / "disk")
    with pytest.raises(ReplayBufferError, match=str(path)):
        GroupStore(tmp_path / "s", settings)


def test_a_log_of_records_that_are_not_ours_is_refused_and_left_alone(tmp_path: Path):
    store = GroupStore(tmp_path)
    put(store, 0)
    store.close()
    (tmp_path / "log").write_bytes(b"\1" * 3 * 128)
    before = files_of(tmp_path)
    with pytest.raises(ReplayBufferError, match="no record that this asyncrl can read"):
        GroupStore(tmp_path)
    assert files_of(tmp_path) == before


def test_kept_groups_stay_in_the_log_however_long_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("asyncrl.buffer.log.COMPACT_FROM", 4)
    store = GroupStore(tmp_path, StoreSettings(keep=True))
    for number in range(10):
        group_id = put(store, number)
        store.lease(lease_id(number + 1), [group_id], **NOW)
        store.commit(lease_id(number + 1), [group_id])
        store.compact_if_long()
    again = GroupStore(tmp_path, StoreSettings(keep=True))  # the killed one's segment is closed: all is in its footer
    (file,) = tmp_path.glob("*.arrow")
    assert pa.ipc.open_file(pa.memory_map(str(file))).num_record_batches == 10
    assert (again.stats().appended, again.stats().committed) == (10, 10)


def compacted(store: GroupStore, **settings) -> GroupStore:
    """After a compaction of the log, the same directory in another process."""
    store._log.compact(store._records())
    return reopened(store, **settings)


def test_leases_keep_their_timeout_through_a_restart_and_a_compaction(tmp_path: Path):
    clock = [0.0]
    store = GroupStore(tmp_path, now=lambda: clock[0])
    ids = [put(store, n) for n in range(2)]
    store.lease(A, ids[:1], **NOW, timeout_s=600.0)
    store.lease(B, ids[1:], **NOW, timeout_s=5.0)
    for _ in range(2):
        clock[0] += 300.0
        store = GroupStore(tmp_path, now=lambda: clock[0])
        assert store.expire_leases() == 0  # their holders may live: all of the timeout begins again
        store._log.compact(store._records())
    clock[0] += 6.0
    assert store.expire_leases() == 1 and offered(store, 9) == [1]
    clock[0] += 600.0
    assert store.expire_leases() == 1


def test_the_number_of_a_segment_is_never_given_again(tmp_path: Path):
    """A client may have the old file of that name open."""
    store = GroupStore(tmp_path, StoreSettings(segment_bytes=20_000))
    ids = [put(store, n, length=400) for n in range(12)]
    last = max(store.locate(i)[0].segment for i in ids)
    store.lease(A, ids, **NOW)
    store.commit(A, ids)
    store.close()
    other = compacted(GroupStore(tmp_path, StoreSettings(segment_bytes=20_000)), segment_bytes=20_000)
    assert other.locate(put(other, 50))[0].segment > last


def test_a_kept_segment_keeps_its_groups_through_a_compaction(tmp_path: Path):
    store = GroupStore(tmp_path, StoreSettings(keep=True))
    ids = [put(store, n) for n in range(4)]
    store.lease(A, ids[1:], **NOW)
    store.commit(A, ids[1:])
    compacted(store, keep=True).close()
    (file,) = tmp_path.glob("*.arrow")
    assert pa.ipc.open_file(pa.memory_map(str(file))).read_all()["number"].to_pylist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_uses_come_with_a_group_and_count(store: GroupStore):
    message = encode_group(make_group(0)).message
    store.append_message(message, checksum=xxhash.xxh3_64_intdigest(message), uses=1)
    for again in (store, reopened(store), compacted(store)):
        (held,) = again.held_entries()
        assert held.uses == 1
    store.lease(A, [held.ref.group_id], **NOW)
    store.commit(A, [held.ref.group_id], max_uses=2)
    assert (store.stats().committed, store.stats().uses) == (1, 1)
