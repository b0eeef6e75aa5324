from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncrl.buffer import ReplayBuffer, ShardAddress, ShardServer
from asyncrl.buffer.wire import pack
from asyncrl.errors import ReplayBufferError
from tests.buffer.faulty import faulty_shard
from tests.buffer.groups import assert_same_group, make_group

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


def test_the_lowest_numbers_of_all_shards_are_leased_first(addresses: list[ShardAddress]):
    with ReplayBuffer(addresses, prefer=0) as first, ReplayBuffer(addresses, prefer=1) as second:
        for number in (8, 1, 4):
            first.append(make_group(number))
        for number in (3, 9, 2):
            second.append(make_group(number))
        lease = first.lease(4, **NOW)
        assert lease is not None
        assert [(ref.number, ref.shard) for ref in lease.refs] == [(1, 0), (2, 1), (3, 1), (4, 0)]
        rest = second.lease(2, **NOW)
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
        buffer.commit(first.lease_id)
        buffer.release(second.lease_id)
    with pytest.raises(ReplayBufferError, match=r"refused read: group .* was committed or evicted"):
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
    buffer.release(lease.lease_id)
    evicted = buffer.evict(policy_version=3, max_staleness=1)
    assert sorted(ref.number for ref in evicted) == [2, 3]
    assert {ref.shard for ref in evicted} == {0, 1}
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
            payload = bytearray(reply[1])
            payload[-200] ^= 1
            return [reply[0], bytes(payload)]
        return reply

    with faulty_shard(flip_a_bit) as address, ReplayBuffer([address]) as buffer:
        buffer.append(make_group(0))
        lease = buffer.lease(1, **NOW)
        assert lease is not None
        with pytest.raises(ReplayBufferError, match=f"{address.endpoint} is corrupted"):
            buffer.read(lease.refs)


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


def test_bad_arguments_are_refused(addresses: list[ShardAddress]):
    with pytest.raises(ReplayBufferError, match="at least one shard"):
        ReplayBuffer([])
    with pytest.raises(ReplayBufferError, match="prefer must be a shard, 0 to 1; got 2"):
        ReplayBuffer(addresses, prefer=2)


def test_concurrent_appends_from_threads_and_clients_all_arrive_once(addresses: list[ShardAddress]):
    groups = [make_group(number, length=50) for number in range(120)]
    with ReplayBuffer(addresses) as one, ReplayBuffer(addresses, prefer=1) as two, ThreadPoolExecutor(8) as pool:
        stored = list(pool.map(lambda group: (one if group.number % 2 else two).append(group), groups))
        assert all(stored)
        lease = one.lease(120, **NOW)
        assert lease is not None and [ref.number for ref in lease.refs] == list(range(120))
        for found, expected in zip(two.read(lease.refs), groups, strict=True):
            assert_same_group(found, expected)


def test_concurrent_appends_of_one_group_store_it_once(addresses: list[ShardAddress]):
    clients = [ReplayBuffer(addresses, prefer=0) for _ in range(4)]
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
                client.commit(lease.lease_id)
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
