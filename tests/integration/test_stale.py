"""[buffer] stale = "drop" in a whole run; tests/test_coordinator.py has the other ways."""

from __future__ import annotations

import pytest

from tests.integration.conftest import Workspace

pytestmark = pytest.mark.integration

STEPS, GROUPS = 6, 8


def test_stale_drop_drops_says_what_and_the_books_balance(workspace: Workspace) -> None:
    """From the untrained model, with a bound that is soon reached."""
    workspace.launch(
        "examples/grpo_async.toml",
        "--name=drop",
        "--buffer.stale=drop",
        f"--steps={STEPS}",
        "--max_staleness=1",
        "--model.path=data/sort/model",
        f"--algorithm.groups_per_step={GROUPS}",
        "--algorithm.group_size=4",
        "--learners.num_ranks=1",
        "--eval.every=100",
    )
    assert "the ledger balances" in workspace.logs()
    rows = [row for row in workspace.metrics("drop") if "learner/loss" in row]
    assert [row["buffer/committed"] for row in rows] == [GROUPS * step for step in range(STEPS)]
    assert max(row["learner/staleness/max"] for row in rows) <= 1
    for row in rows:
        parts = ("in_flight", "stored", "trained", "failed", "evicted")
        assert row["tickets/started"] == sum(row[f"tickets/{part}"] for part in parts)
        assert row["buffer/evicted"] == row["tickets/evicted"]
    last = rows[-1]
    assert last["buffer/evicted"] > 0
    assert last["buffer/evicted/length/mean"] > 0 and last["buffer/committed/length/mean"] > 0
