"""The code in docs/buffer.md runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from asyncrl.buffer import ReplayBuffer, StoreSettings
from tests.buffer.groups import make_group

PAGE = Path(__file__).resolve().parents[2] / "docs" / "buffer.md"


def test_both_examples_of_the_page_run(tmp_path: Path):
    folder = tmp_path / "runs" / "NAME-latest" / "buffer"
    with ReplayBuffer.local(2, directory=str(folder), settings=StoreSettings(durability="disk", keep=True)) as buffer:
        buffer.append_many([make_group(n) for n in range(4)])
        lease = buffer.lease(4, policy_version=0, max_staleness=0)
        assert lease is not None
        buffer.commit(lease)
    standalone, query = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for code, expected in ((standalone, "True"), (query, "reward_mean")):
        run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert expected in run.stdout
