"""The main job as the README gives it: supervised warm-up, asynchronous GRPO, and what they leave in their folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.integration.conftest import Workspace

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def async_run(workspace: Workspace, warm: str) -> str:
    return workspace.launch("examples/grpo_async.toml", "--checkpoint.every=30")


def test_supervised_warm_up_learns_and_saves(workspace: Workspace, warm: str) -> None:
    rows = workspace.metrics("sft_sort")
    losses = [r["learner/loss"] for r in rows if "learner/loss" in r]
    assert len(losses) == 300
    assert losses[-1] < 0.4 * losses[0]
    assert (workspace.run_folder("sft_sort") / "model" / "model.safetensors").exists()


def test_asynchronous_grpo_raises_held_out_accuracy(workspace: Workspace, async_run: str) -> None:
    evals = {r["step"]: r["eval/reward/mean"] for r in workspace.metrics("grpo_sort") if "eval/reward/mean" in r}
    assert evals[0] < 0.5
    assert evals[60] > 0.85
    assert "held-out reward" in async_run and "saved" in async_run


def test_staleness_bound_holds_and_the_ledger_balances(workspace: Workspace, async_run: str) -> None:
    rows = [r for r in workspace.metrics("grpo_sort") if "learner/loss" in r]
    assert len(rows) == 60
    assert max(r["learner/staleness/max"] for r in rows) <= 2
    assert any(r["learner/staleness/max"] > 0 for r in rows), "generation and training never overlapped"
    for row in rows:
        parts = ("in_flight", "stored", "trained", "failed", "evicted")
        assert row["tickets/started"] == sum(row[f"tickets/{part}"] for part in parts)
    assert rows[-1]["tickets/trained"] == 59 * 16


def test_engine_and_learner_agree_on_logprobs_of_fresh_tokens(workspace: Workspace, async_run: str) -> None:
    fresh = [r for r in workspace.metrics("grpo_sort") if r.get("learner/staleness/max") == 0]
    assert fresh, "the first batch is always fresh"
    assert max(r["learner/logprob_gap/max"] for r in fresh) < 1e-3


def test_run_folder_holds_everything_a_person_looks_for(workspace: Workspace, async_run: str) -> None:
    import pyarrow.parquet as pq
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from asyncrl.config_load import load_config

    run = workspace.run_folder("grpo_sort")
    config = load_config(run / "config.toml")
    assert config.steps == 60
    logs = {path.name for path in (run / "logs").iterdir()}
    processes = ("coordinator", "generator-0", "learner-0", "learner-1", "shard-0", "shard-1")
    assert logs == {f"{process}.log" for process in processes}
    samples = sorted((run / "rollouts").glob("*.parquet"))
    table = pq.read_table(samples[0])
    assert table.num_rows == 2 * 16
    assert set(table["reward"].to_pylist()) <= {0.0, 1.0}
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert len(events.Scalars("learner/reward/mean")) == 60
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000030", "step_000060"]


def test_saved_model_loads_in_transformers_and_differs_from_its_start(workspace: Workspace, async_run: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = workspace.run_folder("grpo_sort") / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    prompt = tokenizer("483920=", return_tensors="pt").input_ids
    answer = tokenizer.decode(model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :])
    assert answer.startswith("023489")
    assert _names(folder) == _names(workspace.path / "data" / "sort" / "model")


def _names(folder: Path) -> set[str]:
    with safe_open(str(folder / "model.safetensors"), "pt") as file:
        return set(file.keys())


def test_metrics_are_valid_json_with_increasing_steps(workspace: Workspace, async_run: str) -> None:
    lines = (workspace.run_folder("grpo_sort") / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if "learner/loss" in line]
    assert steps == list(range(1, 61))
