"""The soak, shortened: random kills of real shards, writers and readers; `make soak` runs it for an hour."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"


@pytest.mark.integration
def test_nothing_is_lost_torn_or_doubled_under_random_kills():
    run = subprocess.run([sys.executable, str(SOAK), "--minutes", "0.3"], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "nothing lost, torn, stale or doubled" in run.stdout
    assert "kill shard" in run.stdout
