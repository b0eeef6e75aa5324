"""The supervised run with stand-in ranks: what it trains, evaluates and saves, and when."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import SFTConfig
from asyncrl.errors import CheckpointError
from asyncrl.metrics import JsonlSink, Metrics
from asyncrl.progress import Progress
from asyncrl.run_folder import RunFolder
from asyncrl.supervised import SupervisedRun


class StandInLearners:
    def __init__(self, *, stop_after: int | None = None, full_disk: bool = False) -> None:
        self.trained: list[int] = []
        self.saved: list[str] = []
        self.stop_after = stop_after
        self.full_disk = full_disk
        self.run: SupervisedRun

    async def train_demonstrations(self, step: int) -> dict[str, float]:
        self.trained.append(step)
        if len(self.trained) == self.stop_after:
            self.run.stop()
        return {"learner/tokens": 10.0, "learner/loss": 1.0 / (step + 1)}

    async def evaluate(self) -> dict[str, float]:
        return {"eval/token_accuracy": len(self.trained) / 10}

    async def save(self, path: Path) -> None:
        if self.full_disk:
            raise CheckpointError(f"{path}: no space left")
        self.saved.append(path.name)


def run(folder: Path, learners: StandInLearners, *, held_out: bool = True) -> tuple[Progress, list[dict[str, Any]]]:
    config = SFTConfig.model_validate(
        {
            "job": "sft",
            "name": "test",
            "steps": 5,
            "model": {"path": "m"},
            "data": {"train": "t", "eval": "e" if held_out else None},
            "eval": {"every": 2},
            "checkpoint": {"every": 2},
        }
    )
    progress = Progress(job="test", num_steps=config.steps)
    metrics = Metrics([JsonlSink(folder / "metrics.jsonl")])
    learners.run = SupervisedRun(
        config, learners=learners, run_folder=RunFolder(folder), metrics=metrics, progress=progress
    )
    asyncio.run(learners.run.run())
    return progress, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_batch_is_trained_once_evaluated_and_saved_on_time(tmp_path: Path) -> None:
    learners = StandInLearners()
    progress, rows = run(tmp_path, learners)
    assert learners.trained == [0, 1, 2, 3, 4]
    assert learners.saved == ["step_000002", "step_000004", "model"]
    assert [(r["step"], r["eval/token_accuracy"]) for r in rows if "eval/token_accuracy" in r] == [
        *[(0, 0.0), (2, 0.2), (4, 0.4), (5, 0.5)]
    ]
    assert [r["step"] for r in rows if "learner/loss" in r] == [1, 2, 3, 4, 5]
    assert (progress.phase, progress.step) == ("done", 5)


def test_stop_ends_after_the_step_in_hand_and_saves(tmp_path: Path) -> None:
    learners = StandInLearners(stop_after=3)
    progress, _ = run(tmp_path, learners, held_out=False)
    assert learners.trained == [0, 1, 2]
    assert learners.saved == ["step_000002", "model"]
    assert progress.phase == "stopped" and progress.evals == []


def test_a_model_that_cannot_be_saved_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no space left"):
        run(tmp_path, StandInLearners(full_disk=True))
