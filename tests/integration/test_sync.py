"""mode = "sync": the same config in lock step, bitwise repeatable."""

from __future__ import annotations

import hashlib

import pytest

from asyncrl.metrics import TIMING_PREFIXES
from tests.integration.conftest import Workspace

pytestmark = pytest.mark.integration


def run_sync(workspace: Workspace, name: str) -> tuple[list[dict], str]:
    """Metrics without timings, and a digest of the final weights."""
    workspace.launch(
        "examples/grpo_async.toml",
        "--mode=sync",
        f"--name={name}",
        "--steps=4",
        "--eval.every=1",
        "--eval.samples_per_prompt=2",
        "--generators.num=2",
    )
    rows = [
        {key: value for key, value in row.items() if not key.startswith(TIMING_PREFIXES)}
        for row in workspace.metrics(name)
    ]
    weights = (workspace.run_folder(name) / "model" / "model.safetensors").read_bytes()
    return rows, hashlib.sha256(weights).hexdigest()


def test_two_sync_runs_are_identical(workspace: Workspace, warm: str) -> None:
    first_rows, first_weights = run_sync(workspace, "sync_a")
    second_rows, second_weights = run_sync(workspace, "sync_b")
    assert first_rows == second_rows
    assert first_weights == second_weights
    steps = [row for row in first_rows if "learner/loss" in row]
    assert len(steps) == 4
    assert all(row["learner/staleness/max"] == 0 for row in steps)
    assert len({row["learner/loss"] for row in steps}) == 4
