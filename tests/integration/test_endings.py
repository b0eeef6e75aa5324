"""Runs that do not end well, or are told to end: a clear message, what was made is kept, no process is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT, Workspace
from tests.waiting import wait_until

pytestmark = pytest.mark.integration


def num_steps(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count("learner/loss") if metrics.exists() else 0


def start_training(workspace: Workspace, name: str) -> tuple[subprocess.Popen[str], Path]:
    """A run without an end, after its first step, and its folder."""
    process = workspace.start_launch("examples/grpo_async.toml", f"--name={name}", "--steps=100000")
    folder = workspace.path / "runs" / f"{name}-latest"
    wait_until(lambda: num_steps(folder) > 0, within_s=180, what=workspace.logs)
    return process, folder


def kill(workspace: Workspace, title: str) -> None:
    """SIGKILL one process of the run by what `ps` shows."""
    next(p for p in workspace.processes() if " ".join(p.cmdline()).startswith(title)).kill()


def members_of_runs(workspace: Workspace) -> list[str]:
    """What is left of runs beside a cluster that lives on."""
    titles = [" ".join(p.cmdline()) for p in workspace.processes()]
    return [t for t in titles if "Actor" in t or "VLLM" in t or "asyncrl.rewards.worker" in t or "asyncrl launch" in t]


@pytest.fixture(scope="module")
def stopped(workspace: Workspace, warm: str) -> Path:
    """Folder of a run that lost a shard, went on, was told to stop (as Ctrl-C and Slurm do) and saved its model."""
    process, folder = start_training(workspace, "stopped")
    kill(workspace, "ray::ShardActor")
    steps = num_steps(folder)
    wait_until(lambda: num_steps(folder) > steps + 5, within_s=90, what=workspace.logs)
    process.send_signal(signal.SIGTERM)  # is turned into SIGINT
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    assert "finishing the current step" in output
    assert f"saved  {folder.resolve()}/model" in output
    workspace.assert_nothing_left()
    return folder.resolve()


def test_a_killed_shard_is_started_again_and_a_stopped_run_saves_its_model(stopped: Path) -> None:
    assert (stopped / "model" / "model.safetensors").exists()


def test_two_ctrl_c_while_everything_starts_end_it_at_once(workspace: Workspace, warm: str) -> None:
    process = workspace.start_launch("examples/grpo_async.toml", "--name=hasty")
    wait_until(
        lambda: list(workspace.path.glob("runs/hasty-*/logs/generator-0.log")), within_s=120, what=workspace.logs
    )
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    output, _ = process.communicate(timeout=25)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    workspace.assert_nothing_left()


def test_a_killed_generator_ends_the_run_with_the_model_saved(workspace: Workspace, warm: str) -> None:
    process, folder = start_training(workspace, "killed")
    kill(workspace, "ray::GeneratorActor")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert "a process of the run died: GeneratorActor (process " in output
    assert f"saved  {folder.resolve()}/model" in output
    assert (folder / "model" / "model.safetensors").exists()
    workspace.assert_nothing_left()


def test_a_reward_that_always_fails_stops_the_run_with_its_cause(workspace: Workspace, warm: str) -> None:
    (workspace.path / "late_reward.py").write_text(
        "def score(completion):\n    if completion:\n        raise KeyError('no such unit: parsec')\n    return 0.0\n"
    )
    output = workspace.launch(
        "examples/grpo_async.toml", "--name=failing", "--reward.function=late_reward.py:score", status=2
    )
    assert "groups all failed" in output
    assert "no such unit: parsec" in output
    assert "Traceback" not in output


def test_joining_a_running_cluster(workspace: Workspace, stopped: Path) -> None:
    """With the model that a stopped run saved, and a reward in a package of the working directory."""
    (workspace.path / "my_rewards").mkdir()
    (workspace.path / "my_rewards" / "exact.py").write_text("from asyncrl.rewards import exact_match as score\n")
    ray = str(Path(sys.executable).parent / "ray")
    options = {"env": workspace.environment(), "cwd": "/", "check": True, "capture_output": True, "timeout": 120}
    started = ["start", "--head", "--num-cpus=4", "--port=0", "--include-dashboard=false", "--disable-usage-stats"]
    subprocess.run([ray, *started], **options)  # type: ignore[call-overload]
    try:
        model, reward = stopped / "model", "my_rewards.exact:score"
        process = workspace.start_launch(
            "examples/grpo_async.toml",
            *("--name=joined", "--steps=2", "--address=auto"),
            *(f"--model.path={model}", f"--reward.function={reward}"),
        )
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
        wait_until(lambda: not members_of_runs(workspace), within_s=15, what=lambda: str(workspace.processes()))
        too_many = workspace.start_launch("examples/grpo_async.toml", "--name=too_many", "--generators.num=40")
        output, _ = too_many.communicate(timeout=240)
        assert too_many.returncode == 2
        assert "42.3 CPUs needed, 4 in the cluster" in output
    finally:
        subprocess.run([ray, "stop", "--force"], **options)  # type: ignore[call-overload]
    assert len([r for r in workspace.metrics("joined") if "learner/loss" in r]) == 2
    workspace.assert_nothing_left()


def test_an_address_without_a_cluster_is_said_so(workspace: Workspace, warm: str) -> None:
    output = workspace.launch("examples/grpo_async.toml", "--address=127.0.0.1:1", status=2)
    assert "--address 127.0.0.1:1: no Ray cluster answers there" in output


def test_examples_are_all_loaded() -> None:
    from asyncrl.config_load import load_config

    configs = sorted((ROOT / "examples").glob("*.toml"))
    assert len(configs) >= 3
    for config in configs:
        load_config(config)
