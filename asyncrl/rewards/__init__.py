"""Reward functions: ready-made ones, and the processes that users' own run in.

A reward function is called with keyword arguments: `prompt` and `completion` (text) and every column of the prompt's
row that it names. It returns a number, or a dict of named numbers whose sum is the reward. It may be `async`.
"""

from __future__ import annotations

import re

from asyncrl.rewards.loading import load_function
from asyncrl.rewards.scorer import Score, Scorer

__all__ = ["Score", "Scorer", "exact_match", "last_number", "load_function"]

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def exact_match(completion: str, answer: str) -> float:
    """1 if the completion is the row's `answer`, white space around either aside; else 0."""
    return float(completion.strip() == str(answer).strip())


def last_number(text: str) -> float | None:
    """The last number written in a text ("so 1,234.5 in all" -> 1234.5), None if there is none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
