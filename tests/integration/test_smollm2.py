"""Two steps of GRPO on a real pretrained chat model."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.integration.conftest import ROOT, Workspace

pytestmark = pytest.mark.integration


def test_two_steps_on_smollm2(workspace: Workspace) -> None:
    for script, folder in (("make_smollm2", "data/smollm2"), ("make_arithmetic", "data/arithmetic")):
        command = [sys.executable, str(ROOT / "examples" / f"{script}.py"), folder]
        subprocess.run(command, cwd=workspace.path, check=True, timeout=300)
    workspace.launch(
        "examples/grpo_smollm2.toml",
        "--steps=2",
        "--algorithm.groups_per_step=4",
        "--algorithm.group_size=4",
        "--generators.max_new_tokens=24",
        timeout_s=900,
    )
    rows = [r for r in workspace.metrics("grpo_smollm2") if "learner/loss" in r]
    assert [r["step"] for r in rows] == [1, 2]
    assert rows[0]["learner/logprob_gap/max"] < 1e-2
    for row in rows:  # a gradient, unless all rollouts of every group scored the same
        assert (row["learner/grad_norm"] > 0) == (row["learner/groups/even_fraction"] < 1)
