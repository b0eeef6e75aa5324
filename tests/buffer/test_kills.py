"""SIGKILL and SIGSTOP of real processes: no acknowledged group is lost, none is torn, nothing is trained on twice."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import asyncrl.buffer.connection
from asyncrl.buffer import ReplayBuffer, ShardAddress, ShardServer
from tests.buffer.groups import assert_same_group, make_group
from tests.waiting import wait_until

NOW = {"policy_version": 0, "max_staleness": 0}
SPAWN = multiprocessing.get_context("spawn")


def serve(directory: str, pipe: Any) -> None:
    server = ShardServer(directory)
    pipe.send(server.start().to_dict())
    pipe.recv()
    server.stop()


def write(address: dict[str, Any], first: int, acknowledged: str) -> None:
    """Append groups for ever; every acknowledged number is written down after its acknowledgement."""
    asyncrl.buffer.connection.RESEND_S = 0.3
    with ReplayBuffer([ShardAddress.from_dict(address)]) as buffer, open(acknowledged, "a", buffering=1) as file:
        for number in range(first, first + 100_000):
            buffer.append(make_group(number, length=300))
            file.write(f"{number}\n")


def hold_lease(address: dict[str, Any], pipe: Any) -> None:
    buffer = ReplayBuffer([ShardAddress.from_dict(address)])
    lease = buffer.lease(2, **NOW, timeout_s=2.0)
    pipe.send(lease is not None)
    pipe.recv()  # until it is killed


class Shard:
    """A shard in a process of its own, on a directory that outlives it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.start()

    def start(self) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=serve, args=(str(self.directory), theirs), daemon=True)
        self.process.start()
        self.address = ShardAddress.from_dict(self.pipe.recv())

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def stop(self) -> None:
        """Returns when it is stopped."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        status = psutil.Process(self.process.pid).status
        wait_until(lambda: status() == psutil.STATUS_STOPPED, within_s=10, what=status)

    def wake(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)


@pytest.fixture
def shard(tmp_path: Path):
    shard = Shard(tmp_path / "shard")
    yield shard
    shard.kill()


def acknowledged_in(path: Path) -> set[int]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {int(line) for line in lines if line}


def test_a_killed_shard_continues_with_everything_that_was_acknowledged(shard: Shard, tmp_path: Path):
    files = [tmp_path / f"writer-{i}" for i in range(2)]
    writers = [
        SPAWN.Process(target=write, args=(shard.address.to_dict(), i * 1_000_000, str(f)), daemon=True)
        for i, f in enumerate(files)
    ]
    for writer in writers:
        writer.start()
    for kills in range(3):
        wait_until(
            lambda kills=kills: all(len(acknowledged_in(f)) > 30 * (kills + 1) for f in files),
            within_s=30,
            what=lambda: "waited too long",
        )
        address = shard.address
        shard.kill()
        shard.start()
        assert shard.address == address
    wait_until(lambda: all(len(acknowledged_in(f)) > 120 for f in files), within_s=30, what=lambda: "too slow")
    for writer in writers:
        writer.kill()
        writer.join()
    expected = acknowledged_in(files[0]) | acknowledged_in(files[1])
    with ReplayBuffer([shard.address]) as buffer:
        stats = buffer.stats()
        assert stats.is_balanced and stats.groups >= len(expected)
        lease = buffer.lease(stats.groups, **NOW)
        assert lease is not None and expected <= {ref.number for ref in lease.refs}
        assert len({ref.number for ref in lease.refs}) == len(lease.refs)
        for ref, group in zip(lease.refs, buffer.read(lease.refs), strict=True):
            assert_same_group(group, make_group(ref.number, length=300))


def test_the_segment_of_a_killed_writer_is_closed_and_of_a_stopped_one_is_not(shard: Shard, tmp_path: Path):
    file = tmp_path / "writer"
    writer = SPAWN.Process(target=write, args=(shard.address.to_dict(), 0, str(file)), daemon=True)
    writer.start()
    wait_until(lambda: len(acknowledged_in(file)) > 10, within_s=30, what=lambda: "too slow")
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGSTOP)
    time.sleep(2.5)  # longer than the shard's upkeep takes to notice a dead writer
    assert len(list(shard.directory.glob("*.open"))) == 1
    os.kill(writer.pid, signal.SIGCONT)
    before = len(acknowledged_in(file))
    wait_until(lambda: len(acknowledged_in(file)) > before + 5, within_s=30, what=lambda: "too slow")
    writer.kill()
    wait_until(lambda: not list(shard.directory.glob("*.open")), within_s=30, what=lambda: "too slow")
    assert not list((shard.directory / "writers").iterdir())
    with ReplayBuffer([shard.address]) as buffer:
        assert buffer.stats().groups >= len(acknowledged_in(file))


def test_the_lease_of_a_killed_holder_returns(shard: Shard):
    with ReplayBuffer([shard.address]) as buffer:
        buffer.append_many([make_group(n) for n in range(2)])
        ours, theirs = SPAWN.Pipe()
        holder = SPAWN.Process(target=hold_lease, args=(shard.address.to_dict(), theirs), daemon=True)
        holder.start()
        assert ours.recv()
        time.sleep(3.5)  # longer than the lease lasts without a renewal
        assert buffer.lease(1, **NOW) is None  # it lives and renews
        holder.kill()
        wait_until(lambda: buffer.lease(2, **NOW) is not None, within_s=30, what=lambda: "too slow")


def test_a_lease_survives_the_death_of_its_shard(shard: Shard, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("asyncrl.buffer.connection.RESEND_S", 0.3)
    with ReplayBuffer([shard.address]) as buffer:
        buffer.append_many([make_group(n) for n in range(4)])
        lease = buffer.lease(2, **NOW)
        assert lease is not None
        threading.Timer(0.5, shard.start).start()
        shard.kill()
        buffer.commit(lease)
        stats = buffer.stats()
        assert (stats.committed, stats.groups, stats.leased_groups, stats.is_balanced) == (2, 2, 0, True)


def test_two_processes_cannot_serve_one_directory(shard: Shard):
    with pytest.raises(Exception, match="another process serves the buffer shard"):
        ShardServer(shard.directory).start()
    identity = json.loads((shard.directory / "identity").read_text())
    assert shard.address.endpoint.endswith(f":{identity['port']}")


def test_a_shard_that_was_stopped_longer_than_a_lease_lasts_still_honours_it(shard: Shard):
    """The renewals that came meanwhile lie unread in its socket when it wakes."""
    with ReplayBuffer([shard.address]) as holder, ReplayBuffer([shard.address]) as other:
        holder.append_many([make_group(n) for n in range(2)])
        lease = holder.lease(2, **NOW, timeout_s=4.0)
        assert lease is not None
        shard.stop()
        threading.Timer(5.5, shard.wake).start()
        assert other.lease(1, **NOW) is None  # answered at the wake-up
        holder.commit(lease)
        assert other.stats().committed == 2


def test_a_stopped_shard_does_not_hold_up_the_renewals_at_another(shard: Shard, tmp_path: Path):
    second = Shard(tmp_path / "second")
    with ReplayBuffer([shard.address, second.address]) as holder, ReplayBuffer([second.address]) as other:
        other.append_many([make_group(n) for n in range(2)])
        holder.append(make_group(2))  # to the shard with fewer bytes
        lease = holder.lease(3, **NOW, timeout_s=2.0)
        assert lease is not None
        shard.stop()
        waiting = threading.Thread(target=holder.stats)
        waiting.start()
        time.sleep(3.0)  # longer than the lease lasts without a renewal
        assert other.lease(1, **NOW) is None
        shard.wake()
        waiting.join()
        holder.commit(lease)
    second.kill()
