"""Full disks, damaged and torn files, slow peers: a clear error, nothing else harmed, and on it goes afterwards.

The full disks are real: a small tmpfs where the tests may mount one, and the kernel's limit on the size of a file.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.buffer import ReplayBuffer, StoreSettings
from asyncrl.buffer.log import ShardLog
from asyncrl.buffer.records import RECORD_BYTES, Kind, pack_event
from asyncrl.buffer.segments import SegmentReader
from asyncrl.buffer.snapshot import MANIFEST
from asyncrl.buffer.store import GroupStore
from asyncrl.errors import ReplayBufferError
from tests.buffer.groups import assert_same_group, lease_id, make_group, put

NOW = {"policy_version": 0, "max_staleness": 0}
FULL = "No space left on device|File too large"


class SmallDisk:
    """A folder on a file system of `num_bytes`; fill() leaves no room there, free() some again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ballast = path / "ballast"

    def fill(self) -> None:
        with pytest.raises(OSError, match="No space left"), open(self.ballast, "ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        self.ballast.unlink()


@contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[SmallDisk]:
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system of {num_bytes} bytes to fill: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond that: EFBIG (Python ignores SIGXFSZ)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill_up(buffer: ReplayBuffer, *, first: int = 0) -> int:
    """Append until there is an error that speaks of room; how many groups were acknowledged."""
    number = first
    with pytest.raises(ReplayBufferError, match=FULL):
        while True:
            buffer.append(make_group(number, length=400))
            number += 1
    return number - first


def assert_whole(buffer: ReplayBuffer, numbers: list[int]) -> None:
    """These groups and no others are free, bit for bit. They are then trained on."""
    lease = buffer.lease(len(numbers), **NOW)
    assert lease is not None and [ref.number for ref in lease.refs] == numbers
    for number, group in zip(numbers, buffer.read(lease.refs), strict=True):
        assert_same_group(group, make_group(number, length=400))
    buffer.commit(lease)
    stats = buffer.stats()
    assert stats.is_balanced and stats.groups == stats.quarantined == 0


@pytest.mark.parametrize("over_socket", [False, True])
def test_a_full_shared_memory_harms_nothing_and_is_emptied_by_training(tmp_path: Path, over_socket: bool, monkeypatch):
    """Leases and commits go on though not one page is left; then there is room again."""
    settings = StoreSettings(segment_bytes=100_000)
    with small_disk(tmp_path / "shm", 1_500_000) as disk:
        if over_socket:
            monkeypatch.setattr("asyncrl.buffer.remote.IDENTITY", "no such file")
        with ReplayBuffer.local(1, directory=str(disk.path), settings=settings) as buffer:
            disk.ballast.write_bytes(bytes(300_000))
            num = fill_up(buffer)
            disk.fill()
            assert num > 20
            assert_whole(buffer, list(range(num)))
            disk.free()
            for number in range(100, 120):
                buffer.append(make_group(number, length=400))
        with ReplayBuffer.local(1, directory=str(disk.path), settings=settings) as buffer:
            assert_whole(buffer, list(range(100, 120)))


def test_a_full_disk_stops_spilling_with_its_name_and_memory_does_not_grow(tmp_path: Path):
    with small_disk(tmp_path / "disk", 300_000) as disk:
        settings = StoreSettings(segment_bytes=50_000, memory_bytes=100_000, spill_dir=disk.path / "spilled")
        with ReplayBuffer.local(1, directory=str(tmp_path / "memory"), settings=settings) as buffer:
            num = fill_up(buffer)
            for _ in range(5):
                with pytest.raises(ReplayBufferError, match=rf"cannot be moved to {disk.path}.*No space left"):
                    for number in range(1000, 1030):
                        buffer.append(make_group(number, length=400))
            assert sum(f.stat().st_size for f in tmp_path.glob("memory/*/*.arrow")) < 200_000
            assert not list(disk.path.glob("**/*.tmp"))
            stats = buffer.stats()
            assert stats.is_balanced and stats.groups >= num
            lease = buffer.lease(num, **NOW)
            assert lease is not None
            buffer.commit(lease)
            buffer.append_many([make_group(n, length=400) for n in range(2000, 2010)])
            assert buffer.stats().quarantined == 0


def test_a_snapshot_without_room_is_an_error_and_the_earlier_one_stays_whole(tmp_path: Path):
    with small_disk(tmp_path / "disk", 200_000) as disk, ReplayBuffer.local(1) as buffer:
        buffer.append_many([make_group(n, length=400) for n in range(5)])
        buffer.snapshot(disk.path / "one", policy_version=1)
        buffer.append_many([make_group(n, length=400) for n in range(5, 40)])
        with pytest.raises(ReplayBufferError, match=r"could not be written: .*No space left"):
            buffer.snapshot(disk.path / "two", policy_version=2)
        assert not (disk.path / "two" / MANIFEST).exists()
        with ReplayBuffer.local(1) as other:
            assert other.restore(disk.path / "one") == 1
            assert_whole(other, list(range(5)))
        shutil.rmtree(disk.path / "one")
        with pytest.raises(ReplayBufferError, match="No space left"):
            buffer.snapshot(disk.path / "two", policy_version=2)
        assert_whole(buffer, list(range(40)))
        assert buffer.snapshot(disk.path / "two", policy_version=2) == 0


def test_files_that_may_not_grow_are_an_error_until_they_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """For systems without a disk to fill: the segments are larger than a file may be."""
    monkeypatch.setattr("asyncrl.buffer.log.RESERVE_BYTES", 1 << 13)
    settings = StoreSettings(segment_bytes=4_000_000)
    with ReplayBuffer.local(1, directory=str(tmp_path), settings=settings) as buffer:
        with largest_file(60_000):
            num = fill_up(buffer)
            fill_up(buffer, first=500)
            with pytest.raises(ReplayBufferError, match=r"could not be written: .*File too large"):
                buffer.snapshot(tmp_path / "snapshot", policy_version=0)
        buffer.append(make_group(num, length=400))
    with ReplayBuffer.local(1, directory=str(tmp_path), settings=settings) as buffer:
        assert_whole(buffer, list(range(num + 1)))


def test_a_log_write_that_failed_half_way_leaves_no_record(tmp_path: Path):
    """Records that were written whole before the disk was full would count after a restart."""
    log = ShardLog(tmp_path / "log", sync=False)
    log.write(pack_event(Kind.VERSION, number=1))
    many = b"".join(pack_event(Kind.VERSION, number=n) for n in range(100, 110))
    with largest_file(RECORD_BYTES * 5), pytest.raises(ReplayBufferError, match=FULL):
        log.write(many)
    log.write(pack_event(Kind.VERSION, number=2))
    assert [record.entry.ref.number for record in ShardLog(tmp_path / "log", sync=False).read()] == [1, 2]


def test_a_segment_that_could_not_be_begun_does_not_stop_the_next(tmp_path: Path):
    store = GroupStore(tmp_path, StoreSettings(segment_bytes=20_000))
    ids = [put(store, n, length=400) for n in range(6)]
    store.lease(lease_id(1), ids, **NOW)
    store.commit(lease_id(1), ids)
    assert list(tmp_path.glob("*.recycled"))
    with largest_file(100), pytest.raises(ReplayBufferError, match=FULL):
        put(store, 10, length=3000)
    put(store, 11, length=3000)
    assert store.stats().groups == 1


def test_a_segment_without_room_for_its_footer_stays_open_and_no_record_is_written(tmp_path: Path):
    """Upkeep tries again every second: the log's last room must not go into that."""
    store = GroupStore(tmp_path)
    writer = lease_id(7)
    ids = [put(store, n, length=400) for n in range(3)]
    segment = store.grant(writer, 100)
    assert segment is not None
    before = store._log.num_records
    with largest_file(100):
        for _ in range(3):
            with pytest.raises(ReplayBufferError, match=FULL):
                store.seal_dead_writers()
    assert store._log.num_records == before and segment.is_open
    assert store.seal_dead_writers() == 1 and not segment.is_open
    assert all(store.read(i) for i in ids)


def flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 8]))


@pytest.fixture
def spilled(tmp_path: Path) -> tuple[GroupStore, list[bytes], Path]:
    """A store of ten groups, its oldest segment moved to disk, and that file."""
    settings = StoreSettings(segment_bytes=20_000, memory_bytes=30_000, spill_dir=tmp_path / "disk")
    store = GroupStore(tmp_path / "s", settings)
    ids = [put(store, n, length=400) for n in range(10)]
    return store, ids, min((tmp_path / "disk").glob("*.arrow"))


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_to_a_spilled_file_costs_the_groups_that_it_hit(spilled, damage: str):
    store, ids, file = spilled
    there = [i for i in ids if store.locate(i)[1] == str(file)]
    last, _ = store.locate(there[-1])
    if damage == "flip":
        flip(file, last.offset + last.ref.nbytes - 200)
    elif damage == "truncate":
        os.truncate(file, last.offset + last.ref.nbytes - 1)
    else:
        file.unlink()
    store._reader = SegmentReader()  # as after a restart: no descriptor that keeps a removed file
    lost = there if damage == "remove" else there[-1:]
    for group_id in lost:
        with pytest.raises(ReplayBufferError, match=r"corrupted|truncated|cannot be opened"):
            store.read(group_id)
    kept = [i for i in ids if i not in lost]
    assert all(store.read(i) for i in kept)
    stats = store.stats()
    assert (stats.quarantined, stats.groups) == (len(lost), len(kept)) and stats.is_balanced
    again = GroupStore(store.directory, store._segments._settings)
    assert all(again.read(i) for i in kept) and again.stats().quarantined == len(lost)


def test_a_damaged_footer_costs_nothing(tmp_path: Path):
    """The index is the shard's log; the footer is for other readers, who are told by Arrow."""
    store = GroupStore(tmp_path, StoreSettings(segment_bytes=20_000))
    ids = [put(store, n, length=400) for n in range(10)]
    sealed = min(tmp_path.glob("*.arrow"))
    flip(sealed, sealed.stat().st_size - 40)
    os.truncate(sealed, sealed.stat().st_size - 1)
    again = GroupStore(tmp_path, StoreSettings(segment_bytes=20_000))
    assert all(again.read(i) for i in ids) and again.stats().quarantined == 0


def test_a_read_error_of_the_device_costs_that_group_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = GroupStore(tmp_path)
    ids = [put(store, n) for n in range(3)]
    bad = store.locate(ids[1])[0].offset
    pread = os.pread

    def broken(fd: int, num_bytes: int, offset: int) -> bytes:
        if offset == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, num_bytes, offset)

    monkeypatch.setattr("asyncrl.buffer.segments.os.pread", broken)
    with pytest.raises(ReplayBufferError, match=r"cannot be read: Input/output error; it was given up"):
        store.read(ids[1])
    assert store.read(ids[0]) and store.read(ids[2])
    assert (store.stats().quarantined, store.stats().groups) == (1, 2) and store.stats().is_balanced


@pytest.mark.parametrize(
    "spoil", [lambda text: text[: len(text) // 2], lambda text: text.replace('y_version": 3', 'y_version": 4')]
)
def test_a_torn_or_changed_manifest_is_refused(tmp_path: Path, spoil):
    with ReplayBuffer.local(1) as buffer:
        buffer.append(make_group(0))
        buffer.snapshot(tmp_path, policy_version=3)
        text = (tmp_path / MANIFEST).read_text()
        assert json.loads(text)["policy_version"] == 3
        (tmp_path / MANIFEST).write_text(spoil(text))
        with pytest.raises(ReplayBufferError, match=r"manifest.json (cannot be read|is corrupted)"):
            buffer.restore(tmp_path)
