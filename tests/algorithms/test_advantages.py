"""GRPO advantages against the values of the implementations in use (tests/goldens/grpo_adv.json)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from asyncrl.algorithms.advantages import grpo

GOLDEN = json.loads((Path(__file__).parent.parent / "goldens" / "grpo_adv.json").read_text())
INPUTS = GOLDEN["inputs"]


def case(name: str) -> dict:
    return next(c for c in GOLDEN["cases"] if c["id"] == name)


def per_row(output: list) -> torch.Tensor:
    """Advantages are constant along a row: its first token stands for the rollout."""
    return torch.tensor([row[0] if isinstance(row, list) else row for row in output], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "scores", "tolerance"),
    [
        ("verl_base", "score", 1e-9),
        ("openrlhf_base", "score", 1e-9),
        ("trl_degenerate", "score_degenerate", 1e-9),
        ("areal_base", "score", 1e-6),  # these two were computed in float32
        ("nemo_loo0", "score", 1e-6),
    ],
)
def test_grpo_equals_the_peers(name: str, scores: str, tolerance: float) -> None:
    parameters = case(name)["hyperparameters"]
    outputs = case(name)["outputs"]
    rewards = torch.tensor(INPUTS[scores], dtype=torch.float64)
    result = grpo(rewards, torch.tensor(INPUTS["group_index"]), eps=parameters.get("eps", 1e-6))
    expected = per_row(outputs.get("advantages", outputs.get("advantages_seq")))
    torch.testing.assert_close(result, expected, rtol=0, atol=tolerance)


def test_a_group_of_equal_rewards_gets_exactly_zero() -> None:
    rewards = torch.tensor([0.3, 0.3, 0.3, 1.0, 0.0], dtype=torch.float32)
    result = grpo(rewards, torch.tensor([0, 0, 0, 1, 1]))
    assert result[:3].tolist() == [0.0, 0.0, 0.0]
    assert result[3] > 0 > result[4]


def test_failed_rollouts_are_not_counted() -> None:
    nan = float("nan")
    rewards = torch.tensor([1.0, nan, 0.0, 0.5, nan, nan, 2.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    result = grpo(rewards, groups)
    without = grpo(torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64), torch.tensor([0, 0, 0]))
    torch.testing.assert_close(result[[0, 2, 3]], without)
    # No advantage for a failed rollout, nor for the only scored one of a group.
    assert result[[1, 4, 5, 6]].tolist() == [0.0] * 4
