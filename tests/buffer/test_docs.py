"""The code in docs/buffer.md runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.buffer import ReplayBuffer, StoreSettings
from asyncrl.cli import main
from tests.buffer.groups import make_group

PAGE = Path(__file__).resolve().parents[2] / "docs" / "buffer.md"


def run_code(code: str, folder: Path) -> str:
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture
def examples(tmp_path: Path) -> list[str]:
    """The page's code, to run in tmp_path, where there is a kept run."""
    folder = tmp_path / "runs" / "NAME-latest" / "buffer"
    with ReplayBuffer.local(2, directory=str(folder), settings=StoreSettings(durability="disk", keep=True)) as buffer:
        buffer.append_many([make_group(n) for n in range(4)])
        lease = buffer.lease(4, policy_version=0, max_staleness=0)
        assert lease is not None
        buffer.commit(lease)
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_examples_of_the_page_run(tmp_path: Path, examples: list[str]):
    standalone, query, _ = examples
    assert "True" in run_code(standalone, tmp_path)
    assert "reward_mean" in run_code(query, tmp_path)


def test_the_query_of_an_export_runs(tmp_path: Path, examples: list[str]):
    for module in ("duckdb", "pandas"):
        pytest.importorskip(module)
    folder = tmp_path / "runs" / "NAME-latest"
    out = folder / "trajectories.parquet"
    assert main(["buffer", "export", str(folder), "--to", "parquet", "--out", str(out)]) == 0
    assert "sampled_by_several_versions" in run_code(examples[2], tmp_path)
