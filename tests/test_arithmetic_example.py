"""The arithmetic task: its files, and the reward function that users may copy."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.conftest import load_example


def numbers(row: dict) -> tuple[int, ...]:
    return tuple(sorted(map(int, re.findall(r"\d+", row["prompt"][-1]["content"]))))


def test_questions_are_right_seeded_and_held_out(tmp_path: Path) -> None:
    example = load_example("make_arithmetic")
    for folder in ("a", "b"):
        example.write_all(tmp_path / folder, num_train=200, num_eval=50)
    train, held_out = (
        [json.loads(line) for line in (tmp_path / "a" / name).read_text().splitlines()]
        for name in ("train.jsonl", "eval.jsonl")
    )
    assert (len(train), len(held_out)) == (200, 50)
    for row in train + held_out:
        small, large = numbers(row)
        assert row["answer"] in (small + large, large - small)
    assert not set(map(numbers, train)) & set(map(numbers, held_out))
    assert (tmp_path / "a" / "train.jsonl").read_bytes() == (tmp_path / "b" / "train.jsonl").read_bytes()
    with pytest.raises(SystemExit, match="raise --largest or lower --train"):
        example.write_all(tmp_path, num_train=100, largest=9)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("17 + 25 is <answer>42</answer>.", {"format": 0.2, "correct": 0.8}),
        ("<answer>17 + 25 = 42</answer>", {"format": 0.2, "correct": 0.8}),
        ("<answer>43</answer>", {"format": 0.2, "correct": 0.0}),
        ("<answer>1</answer> or <answer>42</answer>", {"format": 0.0, "correct": 0.8}),
        ("<answer>number</answer>", {"format": 0.0, "correct": 0.0}),
        ("42", {"format": 0.0, "correct": 0.0}),
        ("", {"format": 0.0, "correct": 0.0}),
    ],
)
def test_reward(completion: str, reward: dict[str, float]) -> None:
    assert load_example("smollm2_reward").number_in_tags(completion, answer=42) == reward
