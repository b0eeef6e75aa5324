"""A real full file system: a clear error, nothing else harmed, and it goes on when there is room again."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.buffer import ReplayBuffer
from asyncrl.errors import ReplayBufferError
from tests.buffer.groups import assert_same_group, make_group

NOW = {"policy_version": 0, "max_staleness": 0}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small file system")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def fill(buffer: ReplayBuffer, first: int) -> int:
    """Append groups until one is refused; the number of that one."""
    for number in range(first, first + 10_000):
        try:
            buffer.append(make_group(number, length=2000))
        except ReplayBufferError as error:
            assert "No space left on device" in str(error) and "shard-" in str(error)
            return number
    raise AssertionError("the disk was not full")


def test_a_full_disk_is_said_keeps_what_it_has_and_goes_on_with_room(small_disk: Path):
    with ReplayBuffer.local(directory=small_disk / "buffer", num_shards=2) as buffer:
        first = 0
        for _ in range(3):
            end = fill(buffer, first)
            assert end - first > 50
            stats = buffer.stats()
            assert (stats.groups, stats.is_balanced) == (end - first, True)
            lease = buffer.lease(stats.groups, **NOW)
            assert lease is not None
            for group in buffer.read(lease.refs):
                assert_same_group(group, make_group(group.number, length=2000))
            buffer.commit(lease)
            first = end
    with ReplayBuffer.local(directory=small_disk / "buffer", num_shards=2) as buffer:  # continues
        stats = buffer.stats()
        assert (stats.appended, stats.committed, stats.is_balanced) == (first, first, True)


def test_a_snapshot_without_room_is_none(small_disk: Path):
    with ReplayBuffer.local() as buffer:
        buffer.append_many([make_group(number, length=20_000) for number in range(60)])
        with pytest.raises(ReplayBufferError, match="No space left on device"):
            buffer.snapshot(small_disk / "snapshot", policy_version=0)
        with ReplayBuffer.local() as other, pytest.raises(ReplayBufferError):
            other.restore(small_disk / "snapshot")
        lease = buffer.lease(60, **NOW)
        assert lease is not None and len(buffer.read(lease.refs)) == 60
