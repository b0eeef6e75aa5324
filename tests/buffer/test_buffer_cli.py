"""`asyncrl buffer ...` on real shards, while they are served and after."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from asyncrl.buffer import SCHEMA, ReplayBuffer, StoreSettings, groups_to_table
from asyncrl.buffer.schema import VERSION_KEY
from asyncrl.buffer.store import GroupStore
from asyncrl.buffer.stored import find_shards, read_stored
from asyncrl.cli import main
from asyncrl.shards_file import ShardsFile
from asyncrl.types import Group
from tests.buffer.groups import make_group, put
from tests.waiting import wait_until

CONFIG = """\
job = "rl"
name = "kept"
steps = 2
max_staleness = 1
model.path = "{model}"
data.train = "gone.jsonl"
reward.function = "asyncrl.rewards:exact_match"
algorithm.name = "grpo"
algorithm.groups_per_step = 4
generators.temperature = 0.5
buffer.durability = "{durability}"
buffer.capacity_gb = 1
"""
KEEP = StoreSettings(durability="disk", keep=True)
IDS = np.array([3, 4, 5, 0], np.int32)


def small_group(number: int, *, version: int) -> Group:
    """Of tokens that the sorting task's model knows."""
    group = make_group(number, version=version)
    rollouts = tuple(dataclasses.replace(r, response=r.response % 10) for r in group.rollouts)
    return dataclasses.replace(group, prompt_tokens=IDS, rollouts=rollouts)


GROUPS = [small_group(n, version=n // 4) for n in range(12)]


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Path:
    """A run folder that ended: of twelve groups, four trained on, four dropped for their age, four left."""
    folder = tmp_path / "runs" / "kept-1"
    (folder / "buffer").mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(model=tiny_model, durability="disk"))
    with ReplayBuffer.local(2, directory=str(folder / "buffer"), settings=KEEP) as buffer:
        buffer.append_many(GROUPS[::2])
        buffer.append_many(GROUPS[1::2])
        lease = buffer.lease(4, policy_version=0, max_staleness=9)
        assert lease is not None
        buffer.commit(lease)
        buffer.evict(policy_version=3, max_staleness=1)
    return folder


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    with ReplayBuffer.local(2) as buffer:
        buffer.append_many(GROUPS)
        buffer.snapshot(tmp_path / "snapshot", policy_version=3)
    return tmp_path / "snapshot"


def buffer_command(*arguments: object) -> int:
    return main(["buffer", *map(str, arguments)])


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(f): (f.stat().st_mtime_ns, f.read_bytes()) for f in sorted(folder.rglob("*")) if f.is_file()}


def segment(folder: Path) -> Path:
    return next(folder.rglob("*.arrow"))


# stats


def test_stats_of_an_ended_run_come_from_its_logs(run: Path, capsys: pytest.CaptureFixture[str]):
    assert buffer_command("stats", run, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert not told["live"] and [row["shard"] for row in told["shards"]] == ["shard-0", "shard-1"]
    total = told["total"]
    counts = {
        name: total[name] for name in ("appended", "groups", "leased_groups", "committed", "evicted", "quarantined")
    }
    assert counts == {"appended": 12, "groups": 4, "leased_groups": 0, "committed": 4, "evicted": 4, "quarantined": 0}
    assert (total["in_files"], total["versions"], total["balanced"]) == (12, [0, 2], True)
    files = list(run.rglob("*.arrow"))
    assert (total["segments"], total["bytes"]) == (len(files), sum(f.stat().st_size for f in files))
    assert 0 < total["fill"] < 1e-3
    assert buffer_command("stats", run) == 0
    *_, header, _, _, last = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["shard", "groups", "appended"] and last.split()[:3] == ["total", "4", "12"]


def test_stats_of_a_run_that_goes_on_come_from_its_shards(run: Path, capsys: pytest.CaptureFixture[str]):
    with ReplayBuffer.local(2) as buffer:
        buffer.append_many(GROUPS)
        assert buffer.lease(3, policy_version=2, max_staleness=2) is not None
        ShardsFile(buffer.addresses, [Path("/nowhere")] * 2, None).write(run / "shards.json")
        assert buffer_command("stats", run, "--json") == 0
        total = json.loads(capsys.readouterr().out)["total"]
        assert (total["groups"], total["leased_groups"], total["appended"]) == (9, 3, 12)
    assert (run / "shards.json").stat().st_mode & 0o077 == 0
    assert ShardsFile.read(run / "nothing.json") is None


def test_stats_of_a_run_without_files_come_from_its_metrics(run: Path, capsys: pytest.CaptureFixture[str]):
    shutil.rmtree(run / "buffer")
    row = {"groups": 3, "appended": 10, "leased_groups": 2, "committed": 4, "evicted": 1, "quarantined": 0, "bytes": 7}
    rows = [{"step": 0, "eval/reward/mean": 0.5}, {"step": 6, "buffer/held_bytes": 9, "buffer/fill": 0.25}]
    rows[1] |= {f"buffer/{name}": value for name, value in row.items()}
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert buffer_command("stats", run) == 0
    printed = capsys.readouterr().out
    assert "step 6" in printed and "keep = true" in printed
    assert "appended  10" in printed and "balanced  yes" in printed


# tail


def test_tail_shows_the_newest_groups_as_text(run: Path, capsys: pytest.CaptureFixture[str]):
    from transformers import AutoTokenizer

    model = (run / "config.toml").read_text().split('model.path = "')[1].split('"')[0]
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert buffer_command("tail", run, "-n", 2, "--rollouts", 1) == 0
    printed = capsys.readouterr().out
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("group")] == ["10", "11"]
    assert "prompts.jsonl:11  versions 2..2" in printed and "... 1 more rollouts" in printed
    for ids in (IDS, GROUPS[11].rollouts[0].response):
        assert repr(tokenizer.decode(ids.tolist())) in printed


def test_tail_without_a_run_folder_shows_ids(run: Path, capsys: pytest.CaptureFixture[str]):
    assert buffer_command("tail", run / "buffer" / "shard-0", "-n", 1) == 0
    assert f"prompt    {' '.join(map(str, IDS))}" in capsys.readouterr().out


def test_tail_of_a_run_in_memory_that_ended_says_what_keeps_it(
    run: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.rmtree(run / "buffer")
    (run / "config.toml").write_text(CONFIG.format(model=tiny_model, durability="memory"))
    assert buffer_command("tail", run) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(run) in line and 'durability = "disk"' in line and "keep = true" in line


def test_tail_follows_shards_in_memory_until_they_are_gone(run: Path, tmp_path: Path):
    shards = tmp_path / "shm"
    shutil.rmtree(run / "buffer")
    shown = (tmp_path / "out").read_text
    with ReplayBuffer.local(1, directory=str(shards)) as buffer, open(tmp_path / "out", "w") as out:
        ShardsFile(buffer.addresses, [shards / "shard-0"], None).write(run / "shards.json")
        buffer.append(GROUPS[0])
        command = [sys.executable, "-m", "asyncrl", "buffer", "tail", str(run), "--follow"]
        tail = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            wait_until(lambda: "group 0 " in shown(), within_s=20, what=shown)
            buffer.append(GROUPS[1])
            wait_until(lambda: "group 1 " in shown(), within_s=20, what=shown)
            buffer.close()
            shutil.rmtree(shards)
            wait_until(lambda: tail.poll() == 0 and "the end: " in shown(), within_s=20, what=shown)
        finally:
            tail.kill()
            tail.wait()
    assert shown().count("group 0 ") == 1


# verify


def test_verify_accepts_runs_shards_and_snapshots(run: Path, snapshot: Path, capsys: pytest.CaptureFixture[str]):
    for folder in (run, run / "buffer", snapshot):
        assert buffer_command("verify", folder) == 0
        printed = capsys.readouterr().out
        assert printed.endswith("all good\n")
        assert sum(int(line.split(": ")[1].split()[0]) for line in printed.splitlines()[:-1] if ": " in line) == 12
    assert buffer_command("verify", run / "buffer" / "shard-1") == 0


def flip_a_token(folder: Path) -> str:
    """In the middle of some group; its number."""
    shards = read_stored(find_shards(folder))
    group = shards[0].groups[-1]
    with open(group.path, "r+b") as file:
        at = group.offset + group.ref.nbytes // 2
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 255]), at)
    return f"{group.path}, group {group.ref.number} ("


def cut(path: Path, num_bytes: int) -> str:
    os.truncate(path, path.stat().st_size - num_bytes)
    return f"{path} is truncated"


def foreign(path: Path, content: bytes = b"not ours") -> str:
    path.write_bytes(content)
    return f"{path} is a foreign file"


def rename_over(source: Path, target: Path) -> str:
    shutil.copyfile(source, target)
    return f"{target} is a foreign file: the shard's log knows no such segment"


def remove_held(folder: Path) -> str:
    shards = read_stored(find_shards(folder))
    shard = next(s for s in shards if s.stats is not None and s.stats.groups)
    shard.groups[-1].path.unlink()
    return f"{shard.directory}: segment {int(shard.groups[-1].path.stem):08d} is missing"


def other_version(path: Path) -> str:
    path.write_bytes(path.read_bytes().replace(b"\x01\0\0\x002\0", b"\x01\0\0\x001\0"))
    return f"{path}: unknown trajectory schema version '1': this asyncrl reads version 2"


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_token,
        lambda run: cut(segment(run), 100),
        lambda run: cut(run / "buffer" / "shard-0" / "log", 30),
        lambda run: foreign(run / "buffer" / "shard-1" / "notes.txt"),
        lambda run: foreign(run / "buffer" / "shard-1" / "00000099.arrow"),
        lambda run: rename_over(segment(run), run / "buffer" / "shard-1" / "00000077.arrow"),
        remove_held,
        lambda run: other_version(segment(run)),
    ],
)
def test_verify_names_what_is_bad(run: Path, damage: Callable[[Path], str], capsys: pytest.CaptureFixture[str]):
    expected = damage(run)
    assert buffer_command("verify", run) == 1
    bad = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bad: ")]
    assert any(line.startswith(f"bad: {expected}") for line in bad), bad


def test_verify_names_groups_that_a_truncated_log_does_not_know(run: Path, capsys: pytest.CaptureFixture[str]):
    log = run / "buffer" / "shard-0" / "log"
    os.truncate(log, 2 * 128)  # a grant and the first append
    assert buffer_command("verify", run) == 1
    assert "is not in the shard's log: the log is truncated, or the file is foreign" in capsys.readouterr().out


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: cut(folder / "shard-0.arrow", 10),
        lambda folder: foreign(folder / "shard-7.arrow"),
        lambda folder: flip_a_token(folder).split(", group")[0],
    ],
)
def test_verify_names_what_is_bad_in_a_snapshot(
    snapshot: Path, damage: Callable[[Path], str], capsys: pytest.CaptureFixture[str]
):
    expected = damage(snapshot)
    assert buffer_command("verify", snapshot) == 1
    assert f"bad: {expected}" in capsys.readouterr().out


def test_the_files_of_a_killed_shard_are_read_without_the_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    store = GroupStore(tmp_path / "shard-0", KEEP)
    for number in range(5):
        put(store, number)
    assert list((tmp_path / "shard-0").glob("*.open"))  # never closed
    assert buffer_command("verify", tmp_path) == 0
    assert "5 of 5 groups in 1 files are intact (5 by their recorded checksums" in capsys.readouterr().out


def test_segments_that_are_used_again_or_moved_to_disk_are_no_damage(tmp_path: Path):
    settings = StoreSettings(segment_bytes=20_000, memory_bytes=60_000, spill_dir=tmp_path / "spilled")
    store = GroupStore(tmp_path / "shard-0", settings)
    held: list[bytes] = []
    for number in range(60):
        held.append(put(store, number, length=200) or b"")
        if len(held) > 30:
            group_id = held.pop(0)
            store.lease(group_id, [group_id], policy_version=0, max_staleness=0)
            store.commit(group_id, [group_id])
        (shard,) = read_stored([tmp_path / "shard-0"], spilled=[tmp_path / "spilled"])
        assert shard.verify() == len(shard.groups) and not shard.problems
        assert shard.stats == store.stats() or store.stats().held_bytes > shard.stats.held_bytes  # type: ignore[union-attr]
    found = {group.ref.group_id for group in shard.groups}
    assert found.issuperset(held) and len(found) < 60
    assert list((tmp_path / "shard-0").glob("*.recycled")) or list((tmp_path / "spilled").glob("*.arrow"))
    store._log.compact(store._records())
    (shard,) = read_stored([tmp_path / "shard-0"], spilled=[tmp_path / "spilled"])
    assert shard.verify() == len(shard.groups) and not shard.problems
    assert {group.ref.group_id for group in shard.groups if group.checksum is not None} == set(held)


# export


def test_export_is_one_table_in_the_order_of_the_numbers(run: Path, snapshot: Path, tmp_path: Path):
    expected = groups_to_table(GROUPS)
    assert buffer_command("export", run, "--to", "parquet") == 0
    assert buffer_command("export", snapshot, "--to=parquet", "--out", tmp_path / "s.parquet") == 0
    for path in (run / "trajectories.parquet", tmp_path / "s.parquet"):
        found = pq.read_table(path)
        assert found.schema.names == SCHEMA.names and found.schema.metadata[VERSION_KEY] == b"2"
        assert found.to_pylist() == expected.to_pylist()


def test_export_overwrites_nothing_and_leaves_nothing_half(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    out.mkdir()
    assert buffer_command("export", run, "--to", "parquet", "--out", out) == 0
    before = state_of(out)
    assert buffer_command("export", run, "--to", "parquet", "--out", out) == 2
    assert state_of(out) == before and list(out.iterdir()) == [out / "trajectories.parquet"]
    assert buffer_command("export", run, "--to", "parquet", "--out", tmp_path / "no" / "x.parquet") == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "no" / "x.parquet") in line and "No such file" in line


def test_export_leaves_out_the_damaged_and_says_so(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    name = flip_a_token(run)
    assert buffer_command("export", run, "--to", "parquet", "--out", tmp_path / "x.parquet") == 1
    assert name in capsys.readouterr().err
    assert pq.read_table(tmp_path / "x.parquet").num_rows == 2 * 11


# all


def test_a_run_that_is_looked_at_does_not_change(run: Path, tmp_path: Path):
    before = state_of(run)
    for command in ("stats", "tail", "verify"):
        assert buffer_command(command, run) == 0
    assert buffer_command("export", run, "--to", "parquet", "--out", tmp_path / "x.parquet") == 0
    assert state_of(run) == before
    with ReplayBuffer.local(2, directory=str(run / "buffer"), settings=KEEP) as buffer:  # its lock is free
        assert buffer_command("verify", run) == 0
        assert buffer.stats().appended == 12 and buffer.append(small_group(50, version=3))
        assert buffer_command("stats", run) == 0


@pytest.mark.parametrize("command", ["stats", "tail", "verify", "export", "replay"])
@pytest.mark.parametrize("kind", ["missing", "empty", "file", "sft"])
def test_bad_folders_are_one_line_that_names_them(
    command: str, kind: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
):
    place = tmp_path / kind
    (tmp_path / "run.toml").write_text(CONFIG.format(model=tiny_model, durability="disk"))
    if kind == "file":
        place.write_text("something")
    elif kind != "missing":
        place.mkdir()
    if kind == "sft":
        sft = f'job = "sft"\nname = "s"\nsteps = 1\nmodel.path = "{tiny_model}"\ndata.train = "x.jsonl"\n'
        (place / "config.toml").write_text(sft)
    more = {"export": ["--to", "parquet", "--out", tmp_path / "x"], "replay": ["--config", tmp_path / "run.toml"]}
    assert buffer_command(command, place, *more.get(command, [])) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {place}")


def test_unknown_options_are_refused(run: Path, capsys: pytest.CaptureFixture[str]):
    assert buffer_command("stats", run, "--jsn") == 2
    assert "unexpected '--jsn'; see `asyncrl buffer stats --help`" in capsys.readouterr().err


# replay: what is checked before a process starts


def replay(run: Path, *more: object) -> int:
    (run.parent / "run.toml").write_text((run / "config.toml").read_text())
    return buffer_command("replay", run, "--config", run.parent / "run.toml", *more)


def test_a_dry_run_says_what_would_be_trained_on(run: Path, capsys: pytest.CaptureFixture[str]):
    assert replay(run, "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "# replay of 12 groups" in printed and "versions 0..2; the learner starts as version 3" in printed
    assert "up to 4 versions" in printed  # version 4 at the second step, minus 0
    assert "shard" in printed and "generator" not in printed.split("[buffer]")[1].split("# process")[1]
    assert replay(run, "--versions", "1:1", "--steps=1", "--dry-run") == 0
    assert "# replay of 4 groups" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["--steps=4"], "12 stored groups, each used 1 times at most, make 3 steps of 4"),
        (["--generators.temperature=1.0"], "the stored run sampled at 0.5"),
        (["--algorithm.groups_per_step=14"], "12 groups that fit, less than a batch"),
        (["--buffer.capacity_gb=1e-9"], "capacity_gb = 1e-09: the stored groups take"),
        (["--versions=7:"], "has no group to train on"),
        (["--versions=7"], "--versions is FIRST:LAST"),
    ],
)
def test_a_replay_that_cannot_work_is_refused_at_the_door(
    run: Path, settings: list[str], expected: str, capsys: pytest.CaptureFixture[str]
):
    assert replay(run, *settings) == 2
    assert expected in capsys.readouterr().err


def test_a_replay_leaves_out_what_is_damaged(run: Path, capsys: pytest.CaptureFixture[str]):
    name = flip_a_token(run)
    assert replay(run, "--dry-run") == 0
    captured = capsys.readouterr()
    assert name in captured.err and "# replay of 11 groups" in captured.out


def test_random_damage_is_never_a_crash_and_is_named_unless_it_changes_nothing(run: Path, tmp_path: Path):
    import pyarrow as pa

    rng = np.random.default_rng(0)
    (shard,) = (folder for folder in find_shards(run) if folder.name == "shard-0")
    for _ in range(60):
        work = tmp_path / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(shard, work)
        path = work / rng.choice(["log", "00000001.arrow"])
        data = bytearray(path.read_bytes())
        at = int(rng.integers(len(data)))
        data[at : at + int(rng.choice([1, 50]))] = bytes([data[at] ^ int(rng.integers(1, 256))])
        path.write_bytes(data)
        (found,) = read_stored([work])
        found.verify()
        if not found.problems:  # padding
            tables = [pa.ipc.open_file(str(folder / path.name)).read_all() for folder in (work, shard)]
            assert tables[0].equals(tables[1])
