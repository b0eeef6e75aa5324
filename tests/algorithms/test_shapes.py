"""The jaxtyping shapes of the objective's functions, checked as they are called."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from functools import wraps

import pytest
import torch
from jaxtyping import jaxtyped

from asyncrl.algorithms import advantages, diagnostics, objective


def checker(function: Callable) -> Callable:
    """What beartype would do, for the annotations used here."""
    hints = typing.get_type_hints(function)
    signature = inspect.signature(function)

    def check(name: str, value: object) -> None:
        if isinstance(hints.get(name), type) and not isinstance(value, hints[name]):
            raise TypeError(f"{function.__name__}: {name} does not match {hints[name]}")

    @wraps(function)
    def checked(*args: object, **kwargs: object) -> object:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            check(name, value)
        result = function(*args, **kwargs)
        check("return", result)
        return result

    return checked


def checked(function: Callable) -> Callable:
    return jaxtyped(typechecker=None)(checker(function))  # the axes of one call are bound together


T = torch.linspace(-1, 1, 6)
COUNTS = objective.StepCounts(tokens=6, sequences=2)
LENGTHS = torch.full((6,), 3)
CALLS: dict[str, tuple[Callable, tuple, dict]] = {
    "grpo": (advantages.grpo, (T, torch.arange(6) // 2), {}),
    "log_ratio": (objective.log_ratio, (T, T + 1), {}),
    "clip": (objective.clip, (T.exp(), T), {"low": 0.2, "high": 0.2}),
    "weight_none": (objective.weight_none, (T,), {}),
    "weight_truncate": (objective.weight_truncate, (T,), {"maximum": 2.0}),
    "token_mean": (objective.token_mean, (T, LENGTHS), {"counts": COUNTS}),
    "sequence_mean": (objective.sequence_mean, (T, LENGTHS), {"counts": COUNTS}),
    "kl_estimates": (diagnostics.kl_estimates, (T, T + 1), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_declared_shapes_hold(name: str) -> None:
    function, args, kwargs = CALLS[name]
    checked(function)(*args, **kwargs)


@pytest.mark.parametrize("name", ["grpo", "log_ratio", "clip", "token_mean", "kl_estimates"])
def test_arguments_of_different_lengths_are_caught(name: str) -> None:
    function, args, kwargs = CALLS[name]
    with pytest.raises(TypeError, match="does not match"):
        checked(function)(args[0][:1], args[1], **kwargs)
