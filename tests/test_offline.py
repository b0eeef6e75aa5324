"""The offline run on a real buffer, with learners that note what they are given."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from asyncrl.buffer import ReplayBuffer, StoreSettings
from asyncrl.buffer.stored import StoredGroup, find_shards, in_order, read_stored
from asyncrl.config import OfflineConfig
from asyncrl.config_load import load_config, resolved_toml
from asyncrl.errors import ReplayBufferError
from asyncrl.metrics import JsonlSink, Metrics
from asyncrl.offline import OfflineRun
from asyncrl.progress import Progress
from asyncrl.run_folder import RunFolder
from asyncrl.types import GroupRef
from tests.buffer.groups import make_group

NUM_GROUPS = 12
CONFIG = """\
job = "rl"
name = "offline"
steps = 3
model.path = "model"
data.train = "prompts.jsonl"
reward.function = "asyncrl.rewards:exact_match"
algorithm = {name = "grpo", groups_per_step = 4}
checkpoint.every = 2
"""


class NotingLearners:
    """One rank. Reads its groups from the buffer, as a real one does."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer = buffer
        self.steps: list[tuple[int, list[int]]] = []
        self.saved: list[str] = []
        self.after_step = lambda: None

    async def train_step(self, slices: list[list[GroupRef]], *, policy_version: int) -> dict[str, float]:
        refs = [ref for rank in slices for ref in rank]
        groups = await asyncio.to_thread(self.buffer.read, refs)
        self.steps.append((policy_version, sorted(group.number for group in groups)))
        self.after_step()
        return {"learner/tokens": 1.0, "learner/reward/mean": 0.5, "learner/loss": 0.0}

    async def save(self, path: Path) -> None:
        self.saved.append(path.name)


@pytest.fixture
def stored(tmp_path: Path) -> list[StoredGroup]:
    """Twelve groups of versions 0 to 5 in two shards that ended."""
    with ReplayBuffer.local(2, directory=str(tmp_path / "stored"), settings=StoreSettings(keep=True)) as buffer:
        for n in range(NUM_GROUPS):
            buffer.append(make_group(n, version=n // 2))
    return in_order(read_stored(find_shards(tmp_path / "stored")))


def offline_config(tmp_path: Path, *overrides: str) -> OfflineConfig:
    (tmp_path / "run.toml").write_text(CONFIG)
    config = load_config(tmp_path / "run.toml", ["--learners.num_ranks=1", *overrides])
    return OfflineConfig(**config.model_dump(), oldest_version=0, newest_version=5)


def run(config: OfflineConfig, stored: list[StoredGroup], tmp_path: Path, *, stop_after: int | None = None):
    """The learners, the progress and the metrics after a run."""
    metrics = Metrics([JsonlSink(tmp_path / "metrics.jsonl")])
    progress = Progress(job="offline", num_steps=config.steps)
    with ReplayBuffer.local(2) as buffer:
        learners = NotingLearners(buffer)
        job = OfflineRun(
            config,
            groups=stored,
            buffer=buffer,
            learners=learners,
            run_folder=RunFolder(tmp_path),
            metrics=metrics,
            progress=progress,
        )
        learners.after_step = lambda: job.stop() if len(learners.steps) == stop_after else None
        asyncio.run(job.run())
    metrics.close()
    return learners, progress, [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_groups_are_trained_once_in_their_order_by_later_versions(tmp_path: Path, stored: list[StoredGroup]):
    learners, progress, rows = run(offline_config(tmp_path), stored, tmp_path)
    assert learners.steps == [(6, [0, 1, 2, 3]), (7, [4, 5, 6, 7]), (8, [8, 9, 10, 11])]
    assert learners.saved == ["step_000002", "model"] and progress.phase == "done"
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["buffer/committed"] for row in rows] == [0, 4, 8]
    assert [row["buffer/fill"] for row in rows] == pytest.approx([1, 2 / 3, 1 / 3])
    assert all(row["buffer/evicted"] == 0 and row["buffer/appended"] == NUM_GROUPS for row in rows)


def test_random_orders_repeat_and_use_groups_as_often_as_allowed(tmp_path: Path, stored: list[StoredGroup]):
    config = offline_config(tmp_path, "--buffer.sampling=uniform", "--buffer.max_uses=3", "--steps=5")
    first, *_ = run(config, stored, tmp_path)
    second, *_ = run(config, stored, tmp_path)
    assert first.steps == second.steps
    uses = [number for _, numbers in first.steps for number in numbers]
    assert len(uses) == 20 and max(map(uses.count, uses)) <= 3 and len(set(uses)) > 4


def test_a_run_ends_with_its_groups(tmp_path: Path, stored: list[StoredGroup]):
    learners, progress, _ = run(offline_config(tmp_path, "--steps=9"), stored, tmp_path)
    assert len(learners.steps) == 3 and learners.saved[-1] == "model"
    assert progress.phase == "done: the stored groups were used up after 3 of 9 steps"


def test_stop_ends_after_the_step_and_saves(tmp_path: Path, stored: list[StoredGroup]):
    learners, progress, rows = run(offline_config(tmp_path), stored, tmp_path, stop_after=1)
    assert (len(learners.steps), learners.saved, progress.phase, len(rows)) == (1, ["model"], "stopped", 1)


def test_a_group_that_changed_after_the_check_ends_the_run(tmp_path: Path, stored: list[StoredGroup]):
    with open(stored[3].path, "r+b") as file:
        file.seek(stored[3].offset + stored[3].ref.nbytes // 2)
        file.write(b"\xff\xff")
    with pytest.raises(ReplayBufferError, match=r"group 3 .*xxh3 checksum"):
        run(offline_config(tmp_path), stored, tmp_path)


def test_the_bound_of_an_offline_run_is_the_age_of_its_oldest_group(tmp_path: Path):
    config = offline_config(tmp_path, "--mode=sync", "--buffer.sampling=fifo")
    assert (config.first_version, config.staleness_bound, config.num_generators) == (6, 8, 0)
    (tmp_path / "again.toml").write_text(resolved_toml(config))
    again = load_config(tmp_path / "again.toml")
    assert type(again).__name__ == "RLConfig" and again.model_dump() == config.model_dump()
