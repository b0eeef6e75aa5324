"""A short soak: the long one is `make soak`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.integration
def test_nothing_is_lost_torn_or_used_twice_while_processes_are_killed_and_stopped():
    command = [sys.executable, "-m", "tests.buffer.soak", "--minutes=0.35", "--interval-s=6", "--fault-every-s=1"]
    result = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "killed" in result.stdout and "snapshots" in result.stdout
