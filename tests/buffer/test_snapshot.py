from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from asyncrl.buffer import SCHEMA, ReplayBuffer, Sampling, StoreSettings
from asyncrl.buffer.snapshot import MANIFEST, SnapshotWriter
from asyncrl.errors import ReplayBufferError
from tests.buffer.faulty import faulty_shard
from tests.buffer.groups import assert_same_group, make_group

NOW = {"policy_version": 0, "max_staleness": 0}
GROUPS = [make_group(n, num_rollouts=1 + n % 3, length=20) for n in range(20)]


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """Of twenty groups, three of them leased, in two shards."""
    with ReplayBuffer.local(2) as buffer:
        for group in GROUPS:
            buffer.append(group)
        assert buffer.lease(3, **NOW) is not None
        assert buffer.snapshot(tmp_path / "snapshot", policy_version=7) == 20
        buffer.append(make_group(99))
        assert buffer.stats().is_balanced and buffer.stats().leased_groups == 3
    return tmp_path / "snapshot"


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_a_snapshot_restores_onto_any_number_of_shards(snapshot: Path, num_shards: int):
    with ReplayBuffer.local(num_shards) as buffer:
        assert buffer.restore(snapshot) == 7
        assert buffer.restore(snapshot) == 7  # what is there is ignored
        lease = buffer.lease(20, **NOW)
        assert lease is not None and buffer.stats().appended == 20
        for found, expected in zip(buffer.read(lease.refs), GROUPS, strict=True):
            assert_same_group(found, expected)


def test_a_snapshot_is_arrow_files(snapshot: Path):
    tables = [pa.ipc.open_file(pa.memory_map(str(file))).read_all() for file in sorted(snapshot.glob("*.arrow"))]
    table = pa.concat_tables(tables)
    assert table.schema.equals(SCHEMA, check_metadata=True)
    assert sorted(set(table["number"].to_pylist())) == list(range(20))


def test_segments_of_a_running_snapshot_are_not_recycled(tmp_path: Path):
    with ReplayBuffer.local(1) as buffer:
        buffer.append_many([make_group(n, length=2000) for n in range(60)])
        buffer.snapshot(tmp_path, policy_version=0)
        lease = buffer.lease(60, **NOW)
        assert lease is not None
        buffer.commit(lease)
        buffer.append_many([make_group(n, length=2000) for n in range(100, 160)])
    with ReplayBuffer.local(1) as other:
        other.restore(tmp_path)
        assert other.stats().groups == 60


def truncate(folder: Path) -> None:
    file = folder / "shard-0.arrow"
    file.write_bytes(file.read_bytes()[:-10])


def flip(folder: Path) -> None:
    data = bytearray((folder / "shard-1.arrow").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "shard-1.arrow").write_bytes(data)


def forget_format(folder: Path) -> None:
    (folder / MANIFEST).write_text(json.dumps({"files": {}}))


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda folder: (folder / MANIFEST).unlink(), "is not a buffer snapshot: it has no manifest.json"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "manifest.json cannot be read"),
        (forget_format, "does not say"),
        (lambda folder: (folder / "shard-0.arrow").unlink(), "shard-0.arrow cannot be read: No such file"),
        (truncate, "shard-0.arrow is truncated"),
        (flip, "shard-1.arrow is corrupted: its xxh3"),
    ],
)
def test_a_damaged_or_foreign_snapshot_is_refused_and_nothing_is_appended(snapshot: Path, spoil, match: str):
    spoil(snapshot)
    with ReplayBuffer.local(1) as buffer:
        with pytest.raises(ReplayBufferError, match=match):
            buffer.restore(snapshot)
        assert buffer.stats().appended == 0


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path):
    with ReplayBuffer.local(1) as buffer:
        buffer.append(make_group(0))
        (tmp_path / "shard-0.arrow").mkdir()
        with pytest.raises(ReplayBufferError, match="could not be written"):
            buffer.snapshot(tmp_path, policy_version=0)
        assert not (tmp_path / MANIFEST).exists()


@pytest.mark.parametrize("local", [True, False])
def test_a_restored_group_is_not_used_more_often_than_it_may(tmp_path: Path, local: bool):
    twice = Sampling("uniform", max_uses=2)
    with ReplayBuffer.local(2) as buffer:
        buffer.append_many([make_group(n) for n in range(6)])
        lease = buffer.lease(4, **NOW, sampling=twice)
        assert lease is not None
        buffer.commit(lease)
        used = {ref.number for ref in lease.refs}
        buffer.snapshot(tmp_path, policy_version=0)
    with faulty_shard(lambda request, reply: reply, local=local) as address, ReplayBuffer([address]) as buffer:
        buffer.restore(tmp_path)
        buffer.snapshot(tmp_path / "again", policy_version=0)
        lease = buffer.lease(6, **NOW, sampling=twice)
        assert lease is not None
        buffer.commit(lease)
        assert (buffer.stats().committed, buffer.stats().groups) == (4, 2)
        rest = buffer.lease(2, **NOW, sampling=twice)
        assert rest is not None and {ref.number for ref in rest.refs} == set(range(6)) - used
    manifests = [json.loads((folder / MANIFEST).read_text()) for folder in (tmp_path, tmp_path / "again")]
    uses = [{k: v for file in m["files"].values() for k, v in file["uses"].items()} for m in manifests]
    assert uses[0] == uses[1] == {make_group(n).group_id.hex(): 1 for n in used}


def test_a_snapshot_follows_segments_that_are_renamed_and_spilled_meanwhile(tmp_path: Path, monkeypatch):
    """The copy waits until every segment has been sealed, spilled and its memory used by others."""
    began, goes_on = threading.Event(), threading.Event()
    write = SnapshotWriter._write

    def held_up(self: SnapshotWriter):
        began.set()
        goes_on.wait(20)
        return write(self)

    monkeypatch.setattr(SnapshotWriter, "_write", held_up)
    settings = StoreSettings(segment_bytes=20_000, memory_bytes=30_000, spill_dir=tmp_path / "spilled")
    with ReplayBuffer.local(1, settings=settings) as buffer, ThreadPoolExecutor(1) as pool:
        buffer.append_many([make_group(n, length=400) for n in range(5)])
        snapshot = pool.submit(buffer.snapshot, tmp_path / "snapshot", policy_version=0)
        assert began.wait(20)
        buffer.append_many([make_group(n, length=400) for n in range(5, 40)])
        goes_on.set()
        assert snapshot.result() == 5
    with ReplayBuffer.local(1) as other:
        other.restore(tmp_path / "snapshot")
        lease = other.lease(5, **NOW)
        assert lease is not None and [ref.number for ref in lease.refs] == list(range(5))
