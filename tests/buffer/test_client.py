from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncrl.buffer import ReplayBuffer, Sampling, ShardAddress, ShardServer, StoreSettings
from asyncrl.buffer.wire import pack
from asyncrl.errors import ReplayBufferError
from asyncrl.types import Group
from tests.buffer.faulty import faulty_shard
from tests.buffer.groups import assert_same_group, make_group
from tests.waiting import wait_until

NOW = {"policy_version": 0, "max_staleness": 0}


@pytest.fixture
def buffer():
    with ReplayBuffer.local(num_shards=2) as buffer:
        yield buffer


@pytest.fixture
def addresses():
    servers = [ShardServer() for _ in range(2)]
    yield [server.start() for server in servers]
    for server in servers:
        server.stop()


def op_of(request: list) -> str:
    return json.loads(request[0])["op"]


def test_groups_come_back_as_they_were_appended(buffer: ReplayBuffer):
    groups = [make_group(n, num_rollouts=3, length=200) for n in range(6)]
    assert all(buffer.append(group) for group in groups)
    lease = buffer.lease(6, **NOW)
    assert lease is not None and {ref.shard for ref in lease.refs} == {0, 1}
    for found, expected in zip(buffer.read(lease.refs), groups, strict=True):
        assert_same_group(found, expected)
    assert [g.number for g in buffer.read(lease.refs[::-2])] == [5, 3, 1]
    assert buffer.read([]) == []
    columns = buffer.read_columns(lease.refs[::-2])
    assert [columns.tokens[i] for i in columns.token_offsets[:-1]] == [
        groups[n].prompt_tokens[0] for n in (5, 3, 1) for _ in range(3)
    ]
    assert buffer.read_columns([]).tokens.size == 0


def test_the_lowest_numbers_of_all_shards_are_leased_first(addresses: list[ShardAddress]):
    with ReplayBuffer(addresses[:1]) as one, ReplayBuffer(addresses[1:]) as two, ReplayBuffer(addresses) as both:
        one.append_many([make_group(number) for number in (8, 1, 4)])
        two.append_many([make_group(number) for number in (3, 9, 2)])
        lease = both.lease(4, **NOW)
        assert lease is not None
        assert [(ref.number, ref.shard) for ref in lease.refs] == [(1, 0), (2, 1), (3, 1), (4, 0)]
        rest = both.lease(2, **NOW)
        assert rest is not None and [ref.number for ref in rest.refs] == [8, 9]


def test_too_few_groups_lease_nothing(buffer: ReplayBuffer):
    for number in range(3):
        buffer.append(make_group(number))
    assert buffer.lease(4, **NOW) is None
    assert (buffer.stats().groups, buffer.stats().leased_groups) == (3, 0)
    with pytest.raises(ReplayBufferError, match="at least one group"):
        buffer.lease(0, **NOW)


def test_committed_groups_are_gone_and_released_ones_return(buffer: ReplayBuffer):
    for number in range(4):
        buffer.append(make_group(number))
    first, second = buffer.lease(2, **NOW), buffer.lease(2, **NOW)
    assert first is not None and second is not None and buffer.lease(1, **NOW) is None
    for _ in range(2):
        buffer.commit(first)
        buffer.release(second)
    with pytest.raises(ReplayBufferError, match=r"refused locate: group .* is gone: committed, evicted"):
        buffer.read(first.refs)
    again = buffer.lease(2, **NOW)
    assert again is not None and again.refs == second.refs and again.lease_id != second.lease_id
    stats = buffer.stats()
    assert (stats.appended, stats.groups, stats.leased_groups, stats.committed) == (4, 0, 2, 2)


def test_the_staleness_bound_holds_and_evictions_are_counted(buffer: ReplayBuffer):
    for number in range(6):
        buffer.append(make_group(number, version=number // 2))
    assert buffer.lease(5, policy_version=3, max_staleness=2) is None
    assert (buffer.stats().groups, buffer.stats().evicted) == (4, 2)
    lease = buffer.lease(4, policy_version=3, max_staleness=2)
    assert lease is not None and {3 - ref.min_version for ref in lease.refs} == {1, 2}
    buffer.release(lease)
    evicted = buffer.evict(policy_version=3, max_staleness=1)
    assert sorted(evicted) == sorted(make_group(n).group_id for n in (2, 3))
    assert buffer.stats().evicted == 4


def test_appends_go_to_the_shard_with_the_fewest_bytes(buffer: ReplayBuffer):
    buffer.append(make_group(0, length=5_000))
    for number in range(1, 4):
        buffer.append(make_group(number))
    assert [shard.groups for shard in buffer.stats().shards] == [1, 3]


def test_stats_sum_over_shards(buffer: ReplayBuffer):
    for number in range(3):
        buffer.append(make_group(number))
    stats = buffer.stats()
    assert (stats.groups, stats.rows, stats.appended) == (3, 6, 3)
    assert stats.tokens == sum(make_group(n).num_tokens for n in range(3))
    assert stats.bytes == sum(shard.bytes for shard in stats.shards) > 0


def test_an_append_whose_answer_was_lost_may_be_repeated():
    lost = []

    def lose_first_append(request, reply):
        if op_of(request) == "append" and not lost:
            lost.append(request)
            return None
        return reply

    with faulty_shard(lose_first_append) as address, ReplayBuffer([address], timeout_s=0.3) as buffer:
        with pytest.raises(ReplayBufferError, match=f"{address.endpoint} did not answer append within 0.3 s"):
            buffer.append(make_group(0))
        assert buffer.append(make_group(0)) is False
        assert buffer.stats().appended == 1


def test_a_request_without_an_answer_is_sent_again(monkeypatch: pytest.MonkeyPatch):
    """As when the shard was killed and another process took its place."""
    monkeypatch.setattr("asyncrl.buffer.connection.RESEND_S", 0.1)
    lost: list[str] = []

    def lose_everything_once(request, reply):
        if op_of(request) not in lost:
            lost.append(op_of(request))
            return None
        return reply

    for local in (True, False):
        lost.clear()
        with faulty_shard(lose_everything_once, local=local) as address, ReplayBuffer([address]) as buffer:
            for number in range(4):
                buffer.append(make_group(number))
            lease, rest = buffer.lease(2, **NOW), buffer.lease(1, **NOW)
            assert lease is not None and rest is not None
            assert [group.number for group in buffer.read(lease.refs)] == [0, 1]
            buffer.commit(lease)
            buffer.release(rest)
            stats = buffer.stats()
            assert (stats.appended, stats.committed, stats.groups, stats.is_balanced) == (4, 2, 2, True)
            assert {"append" if local else "append_messages", "lease", "commit", "release"} <= set(lost)


@pytest.mark.parametrize("local", [True, False])
def test_answers_that_come_twice_and_late_are_told_apart(local: bool):
    """Before each answer comes the one to an earlier request again, and each comes twice."""
    earlier: list[list] = []

    def again_and_twice(reply: list) -> list[list]:
        earlier.append(reply)
        return [*earlier[-3:], reply]

    def unchanged(request: list, reply: list) -> list:
        return reply

    with faulty_shard(unchanged, local=local, deliver=again_and_twice) as address, ReplayBuffer([address]) as buffer:
        for number in range(6):
            assert buffer.append(make_group(number)) is True
            assert buffer.append(make_group(number)) is False
        lease, rest = buffer.lease(4, **NOW), buffer.lease(2, **NOW)
        assert lease is not None and rest is not None
        assert [group.number for group in buffer.read([*lease.refs, *rest.refs])] == [0, 1, 2, 3, 4, 5]
        buffer.commit(lease)
        buffer.release(rest)
        stats = buffer.stats()
        assert (stats.appended, stats.committed, stats.groups, stats.is_balanced) == (6, 4, 2, True)


def test_a_writer_gets_another_segment_when_the_answer_to_its_wish_for_one_was_late():
    """It has let go of the old one, which the shard has sealed: nothing is written there again."""
    lost: list[bool] = []

    def lose_second_grant(request: list, reply: list) -> list | None:
        if op_of(request) == "grant":
            lost.append(True)
            return None if len(lost) == 2 else reply
        return reply

    small = StoreSettings(segment_bytes=20_000)
    with faulty_shard(lose_second_grant, settings=small) as address, ReplayBuffer([address], timeout_s=0.3) as buffer:
        buffer.append_many([make_group(0), make_group(1)])
        with pytest.raises(ReplayBufferError, match="did not answer grant"):
            buffer.append(make_group(2, length=600))
        groups = [make_group(3), make_group(2, length=600)]  # the first would have fitted in the old one
        assert buffer.append_many(groups) == [True, True]
        lease = buffer.lease(4, **NOW)
        assert lease is not None
        assert [g.number for g in buffer.read(lease.refs)] == [0, 1, 2, 3]
        assert buffer.stats().quarantined == 0


def test_a_repeated_append_goes_to_the_shard_that_may_have_it():
    answers = threading.Event()

    def ignore_appends(request, reply):
        return None if op_of(request) == "append" and not answers.is_set() else reply

    server = ShardServer()
    with faulty_shard(ignore_appends) as slow, ReplayBuffer([slow, server.start()], timeout_s=0.3) as buffer:
        with pytest.raises(ReplayBufferError, match="did not answer append"):
            buffer.append(make_group(0))  # the first append goes to shard 0
        answers.set()
        assert buffer.append(make_group(0)) is False  # though shard 1 has received fewer
        assert buffer.append(make_group(1)) is True
        assert [shard.appended for shard in buffer.stats().shards] == [1, 1]
    server.stop()


def test_a_lease_that_one_shard_does_not_grant_is_rolled_back_on_all():
    server = ShardServer()

    def refuse_leases(request, reply):
        return pack({**json.loads(reply[0]), "granted": False}) if op_of(request) == "lease" else reply

    with faulty_shard(refuse_leases) as address, ReplayBuffer([server.start(), address]) as buffer:
        for number in range(4):
            buffer.append(make_group(number))
        assert buffer.lease(4, **NOW) is None
        stats = buffer.stats()
        assert (stats.groups, stats.leased_groups) == (4, 0)
    server.stop()


def test_a_lease_that_one_shard_does_not_answer_is_rolled_back_on_all():
    server = ShardServer()

    def ignore_leases(request, reply):
        return None if op_of(request) == "lease" else reply

    with (
        faulty_shard(ignore_leases) as address,
        ReplayBuffer([server.start(), address], timeout_s=0.3) as buffer,
    ):
        for number in range(4):
            buffer.append(make_group(number))
        with pytest.raises(ReplayBufferError, match="did not answer lease"):
            buffer.lease(4, **NOW)
        stats = buffer.stats()
        assert (stats.groups, stats.leased_groups) == (4, 0)
    server.stop()


def test_a_reader_detects_corruption_on_the_way():
    def flip_a_bit(request, reply):
        if op_of(request) == "read":
            payload = bytearray(reply[2])
            payload[-200] ^= 1
            return [*reply[:2], bytes(payload)]
        return reply

    with faulty_shard(flip_a_bit, local=False) as address, ReplayBuffer([address]) as buffer:
        buffer.append(make_group(0))
        lease = buffer.lease(1, **NOW)
        assert lease is not None
        with pytest.raises(ReplayBufferError, match=rf"{address.endpoint} is corrupted.*own copy is intact, try again"):
            buffer.read(lease.refs)
        assert buffer.stats().quarantined == 0


def test_a_reader_detects_corruption_in_the_files_and_the_shard_gives_the_group_up(tmp_path: Path):
    with ReplayBuffer.local(1, directory=str(tmp_path)) as buffer:
        buffer.append_many([make_group(n, length=200) for n in range(3)])
        (segment,) = tmp_path.glob("shard-0/*.open")
        data = bytearray(segment.read_bytes())
        data[-300] ^= 1  # in the last group
        segment.write_bytes(data)
        lease = buffer.lease(3, **NOW)
        assert lease is not None
        with pytest.raises(ReplayBufferError, match=r"group 2 .* is corrupted.*it was given up"):
            buffer.read(lease.refs)
        assert [g.number for g in buffer.read(lease.refs[:2])] == [0, 1]
        buffer.commit(lease)
        stats = buffer.stats()
        assert (stats.quarantined, stats.committed, stats.leased_groups) == (1, 2, 0) and stats.is_balanced


def test_a_dead_shard_is_named():
    server = ShardServer()
    address = server.start()
    server.stop()
    with (
        ReplayBuffer([address], timeout_s=0.2) as buffer,
        pytest.raises(ReplayBufferError, match=f"{address.endpoint} did not answer stats within 0.2 s"),
    ):
        buffer.stats()


def test_a_closed_buffer_says_so():
    buffer = ReplayBuffer.local(num_shards=1)
    buffer.close()
    buffer.close()
    with pytest.raises(ReplayBufferError, match="closed"):
        buffer.stats()


def test_bad_arguments_are_refused():
    with pytest.raises(ReplayBufferError, match="at least one shard"):
        ReplayBuffer([])


def test_concurrent_appends_from_threads_and_clients_all_arrive_once(addresses: list[ShardAddress]):
    groups = [make_group(number, length=50) for number in range(120)]
    with ReplayBuffer(addresses) as one, ReplayBuffer(addresses) as two, ThreadPoolExecutor(8) as pool:
        stored = list(pool.map(lambda group: (one if group.number % 2 else two).append(group), groups))
        assert all(stored)
        lease = one.lease(120, **NOW)
        assert lease is not None and [ref.number for ref in lease.refs] == list(range(120))
        for found, expected in zip(two.read(lease.refs), groups, strict=True):
            assert_same_group(found, expected)


def test_concurrent_appends_of_one_group_store_it_once(addresses: list[ShardAddress]):
    clients = [ReplayBuffer(addresses[:1]) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        stored = list(pool.map(lambda client: client.append(make_group(5)), clients * 5))
    assert stored.count(True) == 1
    assert clients[0].stats().appended == 1
    for client in clients:
        client.close()


def test_concurrent_leases_never_share_a_group(addresses: list[ShardAddress]):
    clients = [ReplayBuffer(addresses) for _ in range(3)]
    for number in range(60):
        clients[0].append(make_group(number))

    def take_all(client: ReplayBuffer) -> list[int]:
        taken: list[int] = []
        while client.stats().groups:
            lease = client.lease(2, **NOW)
            taken += [ref.number for ref in lease.refs] if lease else []
            if lease:
                client.commit(lease)
        return taken

    with ThreadPoolExecutor(3) as pool:
        taken = [number for numbers in pool.map(take_all, clients) for number in numbers]
    assert sorted(taken) == list(range(60))
    assert clients[0].stats().committed == 60
    for client in clients:
        client.close()


def test_the_package_imports_neither_torch_nor_ray_nor_vllm():
    code = (
        "import sys; from asyncrl.buffer import ReplayBuffer; "
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers', 'pandas') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_folder_cannot_be_imported_as_a_package_of_its_own():
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run([sys.executable, "-c", "import buffer"], capture_output=True, text=True, cwd=root)
    assert "import this package as asyncrl.buffer" in result.stderr


def test_a_lease_comes_back_when_its_holder_dies_and_not_while_it_lives(addresses: list[ShardAddress]):
    holder, other = ReplayBuffer(addresses), ReplayBuffer(addresses)
    holder.append_many([make_group(n) for n in range(4)])
    holder.append(make_group(4))
    longer = holder.lease(1, **NOW)  # a long lease before does not make the renewals rare
    lease = holder.lease(4, **NOW, timeout_s=1.5)
    assert longer is not None and lease is not None
    time.sleep(2.5)  # longer than the lease lasts without a renewal
    assert other.lease(1, **NOW) is None
    holder.close()  # without a word about the lease
    wait_until(lambda: other.stats().groups == 4, within_s=30, what=lambda: str(other.stats()))
    again = other.lease(4, **NOW)
    assert again is not None and again.refs == lease.refs
    other.close()


def test_batches_can_be_bounded_by_tokens(buffer: ReplayBuffer):
    groups = [make_group(n, length=10 * (n + 1)) for n in range(5)]
    buffer.append_many(groups)
    tokens = [g.num_tokens for g in groups]
    lease = buffer.lease(5, **NOW, max_tokens=sum(tokens[:3]) + 1)
    assert lease is not None and [ref.number for ref in lease.refs] == [0, 1, 2]
    buffer.release(lease)
    one = buffer.lease(5, **NOW, max_tokens=1)
    assert one is not None and [ref.number for ref in one.refs] == [0]


def with_reward(group: Group, reward: float) -> Group:
    return dataclasses.replace(group, rollouts=tuple(dataclasses.replace(r, reward=reward) for r in group.rollouts))


@pytest.mark.parametrize("order", ["uniform", "prioritized"])
def test_random_orders_do_not_prefer_a_shard(addresses: list[ShardAddress], order):
    """Shard 0 holds 2 groups, shard 1 holds 6: each group is as likely as any other."""
    counts = [0] * 8
    with ReplayBuffer(addresses[:1]) as one, ReplayBuffer(addresses[1:]) as two, ReplayBuffer(addresses) as both:
        groups = [with_reward(make_group(n), 1.0) for n in range(8)]
        one.append_many(groups[:2])
        two.append_many(groups[2:])
        for _ in range(400):
            lease = both.lease(2, **NOW, sampling=Sampling(order))
            assert lease is not None
            for ref in lease.refs:
                counts[ref.number] += 1
            both.release(lease)
    assert all(60 < count < 145 for count in counts)


def test_replay_uses_each_group_max_uses_times(buffer: ReplayBuffer):
    buffer.append_many([make_group(n) for n in range(3)])
    sampling = Sampling("uniform", max_uses=2)
    for _ in range(3):
        lease = buffer.lease(2, **NOW, sampling=sampling)
        assert lease is not None
        buffer.commit(lease)
        buffer.commit(lease)
        if buffer.stats().groups < 2:
            break
    stats = buffer.stats()
    assert stats.uses == 6 - stats.groups and stats.is_balanced


def test_a_drained_shard_takes_no_more_and_gives_what_it_has(addresses: list[ShardAddress]):
    with ReplayBuffer(addresses) as buffer, ReplayBuffer(addresses) as other:
        other.append_many([make_group(n) for n in range(4)])
        buffer.drain_shard(0)
        other.append_many([make_group(n) for n in range(4, 8)])
        buffer.append_many([make_group(n) for n in range(8, 12)])
        shards = buffer.stats().shards
        assert (shards[0].appended, shards[1].appended) == (4, 8)
        lease = buffer.lease(12, **NOW)
        assert lease is not None and [ref.number for ref in lease.refs] == list(range(12))
        buffer.drain_shard(1)
        with pytest.raises(ReplayBufferError, match="every shard of the replay buffer is draining"):
            buffer.append(make_group(20))


def test_a_shard_that_is_added_is_used(addresses: list[ShardAddress]):
    with ReplayBuffer(addresses[:1]) as buffer:
        buffer.append_many([make_group(n) for n in range(3)])
        assert buffer.add_shard(addresses[1]) == 1
        buffer.append(make_group(3))
        assert [shard.appended for shard in buffer.stats().shards] == [3, 1]
        lease = buffer.lease(4, **NOW)
        assert lease is not None and len(buffer.read(lease.refs)) == 4


def test_a_full_buffer_waits_for_room_and_then_says_so(tmp_path: Path):
    settings = StoreSettings(segment_bytes=20_000, capacity_bytes=50_000)
    with ReplayBuffer.local(1, settings=settings) as local, ReplayBuffer(local.addresses, timeout_s=1.0) as buffer:
        with pytest.raises(ReplayBufferError, match=r"the replay buffer is full: 1 groups found no room within 1 s"):
            for number in range(30):
                buffer.append(make_group(number, length=200))
        lease = buffer.lease(3, **NOW)
        assert lease is not None
        threading.Timer(0.3, buffer.commit, [lease]).start()
        assert buffer.append(make_group(99, length=200))
        assert buffer.stats().is_balanced


def test_a_group_larger_than_a_segment_is_stored_too(tmp_path: Path):
    with ReplayBuffer.local(1, settings=StoreSettings(segment_bytes=20_000)) as buffer:
        groups = [make_group(0), make_group(1, length=40_000), make_group(2)]
        buffer.append_many(groups)
        lease = buffer.lease(3, **NOW)
        assert lease is not None
        for found, expected in zip(buffer.read(lease.refs), groups, strict=True):
            assert_same_group(found, expected)


def test_over_the_socket_groups_are_the_same_and_no_files_are_touched():
    groups = [make_group(n, length=300) for n in range(5)]
    with faulty_shard(lambda request, reply: reply, local=False) as address, ReplayBuffer([address]) as buffer:
        assert buffer.append_many(groups) == [True] * 5
        lease = buffer.lease(5, **NOW)
        assert lease is not None
        for found, expected in zip(buffer.read(lease.refs), groups, strict=True):
            assert_same_group(found, expected)


def test_one_refused_group_does_not_harm_the_others(buffer: ReplayBuffer):
    buffer.advance(3)
    with pytest.raises(ReplayBufferError, match=r"1 of 3 groups were refused: group 1 has tokens of policy version 9"):
        buffer.append_many([make_group(0), make_group(1, version=9), make_group(2)])
    assert buffer.stats().appended == 2
