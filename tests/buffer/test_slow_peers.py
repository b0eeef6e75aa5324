"""A client on a slow line beside a fast one: the fast one keeps its rate."""

from __future__ import annotations

import itertools
import socket
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import asyncrl.buffer.remote
from asyncrl.buffer import ReplayBuffer, ShardAddress
from tests.buffer.groups import make_group
from tests.buffer.test_kills import SPAWN, Shard
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

NOW = {"policy_version": 0, "max_staleness": 0}
ROUND_S, NUM_ROUNDS = 0.5, 4
LINE_BYTES_PER_S = 1_000_000


def forward(source: socket.socket, target: socket.socket) -> None:
    """Bytes from one socket to another, at the rate of the line."""
    while data := source.recv(10_000):
        time.sleep(len(data) / LINE_BYTES_PER_S)
        target.sendall(data)


def slow_line(port: int) -> int:
    """Another port, that leads to this one over a slow line."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            near, _ = listener.accept()
            far = socket.create_connection(("127.0.0.1", port))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=forward, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1]


def use_slowly(port: int, writes: bool, done: Any) -> None:
    """Append, or read, groups of 190 kB over a slow line for ever; `done` counts them."""
    asyncrl.buffer.remote.IDENTITY = "not on this host"
    with ReplayBuffer([ShardAddress(f"tcp://127.0.0.1:{slow_line(port)}", None)]) as buffer:
        for number in itertools.count(10_000_000):
            if writes:
                buffer.append(make_group(number, num_rollouts=8, length=2000))
            elif lease := buffer.lease(1, **NOW):
                buffer.read(lease.refs)
                buffer.release(lease)
            done.value += 1


def rate(step: Callable[[], object]) -> float:
    """Steps per second, over one round."""
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < ROUND_S:
        step()
        count += 1
    return count / (time.perf_counter() - begin)


@pytest.mark.parametrize("writes", [True, False])
def test_a_slow_peer_costs_a_fast_one_less_than_half_of_its_rate(tmp_path: Path, writes: bool):
    """Rounds alone and rounds with the slow one (it is stopped in between) take turns, since the machine is noisy."""
    shard = Shard(tmp_path / "shard")
    done = SPAWN.Value("q", 0, lock=False)
    port = int(shard.address.endpoint.rsplit(":", 1)[1])
    slow = SPAWN.Process(target=use_slowly, args=(port, writes, done), daemon=True)
    numbers = itertools.count()
    with ReplayBuffer([shard.address]) as buffer:

        def step() -> None:
            if writes:
                buffer.append(make_group(next(numbers), num_rollouts=8, length=200))
            elif lease := buffer.lease(4, **NOW):
                buffer.read(lease.refs)
                buffer.release(lease)

        buffer.append_many([make_group(next(numbers), num_rollouts=8, length=2000) for _ in range(20)])
        slow.start()
        wait_until(lambda: done.value > 1, within_s=30, what=lambda: "the slow one does not work")
        rates: dict[bool, list[float]] = {True: [], False: []}
        process, before = psutil.Process(slow.pid), done.value
        for _ in range(NUM_ROUNDS):
            process.suspend()
            rates[False].append(rate(step))
            process.resume()
            rates[True].append(rate(step))
        alone, beside = statistics.median(rates[False]), statistics.median(rates[True])
        slow_rate = (done.value - before) / (NUM_ROUNDS * ROUND_S)
        slow.kill()
        print(f"alone {alone:.0f}/s, beside a slow one {beside:.0f}/s; the slow one {slow_rate:.1f}/s")
        assert 0 < slow_rate < alone / 10
        assert beside > 0.5 * alone, f"{beside:.0f}/s beside a slow one of {slow_rate:.1f}/s, {alone:.0f}/s alone"
    shard.kill()
