"""Training from the kept trajectories of a run, with real learners under Ray."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from asyncrl.buffer import ReplayBuffer, StoreSettings
from asyncrl.types import Group, Rollout
from tests.integration.conftest import Workspace

pytestmark = pytest.mark.integration

NUM_GROUPS, GROUP_SIZE, STEPS = 8, 4, 2


def stored_group(number: int, logprob: float) -> Group:
    """Digits, as the sorting task's model writes them, each sampled with the same logprob."""
    rng = np.random.default_rng(number)
    rollouts = tuple(
        Rollout(
            response=rng.integers(3, 13, 6, dtype=np.int32),
            loss_mask=np.ones(6, np.bool_),
            behaviour_logprobs=np.full(6, logprob, np.float32),
            policy_versions=np.full(6, number // 2, np.int32),
            reward=float(i % 2),
            finish_reason="length",
            seconds=0.1,
        )
        for i in range(GROUP_SIZE)
    )
    prompt = rng.integers(3, 13, 6, dtype=np.int32)
    return Group(rng.bytes(16), number, f"prompts.jsonl:{number}", prompt, rollouts, "generator-0", 0.0)


@pytest.fixture(scope="module")
def replayed(workspace: Workspace) -> str:
    """What `asyncrl buffer replay` of eight groups printed."""
    folder = workspace.path / "stored"
    logprob = float(np.log(1 / 10))
    with ReplayBuffer.local(2, directory=str(folder), settings=StoreSettings(durability="disk", keep=True)) as buffer:
        buffer.append_many([stored_group(n, logprob) for n in range(NUM_GROUPS)])
    process = workspace.start(
        *("buffer", "replay", str(folder), "--config", "examples/grpo_async.toml", "--name=replayed"),
        *("--model.path=data/sort/model", f"--steps={STEPS}", "--algorithm.groups_per_step=4"),
        *(
            "--learners.lr=1e-2",
            "--learners.warmup_steps=0",
            "--data.train=not_there.jsonl",
            "--buffer.num_shards=1",
            "--learners.num_ranks=1",
        ),
    )
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, f"{output}\n{workspace.logs()}"
    workspace.assert_nothing_left()
    return output


def test_a_replay_trains_and_measures_how_old_its_groups_are(workspace: Workspace, replayed: str) -> None:
    rows = workspace.metrics("replayed")
    assert [row["step"] for row in rows] == [1, 2]
    # Versions 0..3 were stored: the learner is version 4 at its first step, which takes groups of versions 0 and 1.
    assert [row["learner/staleness/max"] for row in rows] == [4, 3]
    assert [row["learner/staleness/mean"] for row in rows] == [3.5, 2.5]
    assert [row["learner/reward/mean"] for row in rows] == [0.5, 0.5]
    assert [row["learner/lr"] for row in rows] == [1e-2, 1e-2]
    assert rows[-1]["buffer/appended"] == NUM_GROUPS and rows[-1]["buffer/evicted"] == 0
    assert 0 < rows[0]["learner/weight/mean"] < 2 and "learner/logprob_gap/max" not in rows[0]
    assert not any(name.startswith(("eval/", "tickets/")) for row in rows for name in row)
    assert "max_staleness is not enforced" in replayed and "no evaluation either" in replayed


def test_a_replay_leaves_the_run_folder_of_a_launch(workspace: Workspace, replayed: str) -> None:
    from asyncrl.config_load import load_config

    run = workspace.run_folder("replayed")
    assert load_config(run / "config.toml").steps == STEPS
    assert (run / "config.toml").read_text().startswith("# made by: asyncrl buffer replay")
    assert not (run / "shards.json").exists()
    logs = {path.name for path in (run / "logs").iterdir()}
    assert logs == {f"{name}.log" for name in ("coordinator", "learner-0", "shard-0")}
    assert digest(run / "model") != digest(workspace.path / "data" / "sort" / "model")


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
