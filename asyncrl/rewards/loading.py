"""Imports a reward function by name and checks what it asks for. Runs in the reward process: keep the imports light."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from asyncrl.errors import RewardError
from asyncrl.suggest import did_you_mean, nearest

GIVEN = ("prompt", "completion")
"""Arguments that every reward function may name, whatever the data's columns."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a reward function takes.

    Attributes:
        required: parameters without a default.
        optional: parameters with a default.
        takes_all: it has **kwargs, so every column is passed.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_all: bool

    def select(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The part of `arguments` that the function wants."""
        if self.takes_all:
            return arguments
        return {name: arguments[name] for name in (*self.required, *self.optional) if name in arguments}


def split_name(function: str) -> tuple[str, str]:
    """ "module:name" or "path.py:name" -> (module or path, name)."""
    source, colon, name = function.rpartition(":")
    if not colon or not source or not name:
        raise RewardError(
            f'[reward] function must be "module:name" or "path/file.py:name"; got {function!r}, '
            f"which does not say {'which function' if colon or source else 'the file and the function'}"
        )
    return source, name


def is_path(source: str) -> bool:
    """Whether the part before the colon is a file rather than a module."""
    return source.endswith(".py") or "/" in source or os.sep in source


def load_function(function: str) -> Callable[..., Any]:
    """Import "module:name" or "path.py:name" (the file's folder is put on sys.path, as for a script).

    Raises:
        RewardError: saying what was looked for and what exists.
    """
    source, name = split_name(function)
    module = _load_file(source) if is_path(source) else _load_module(source)
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            own = [n for n, v in vars(module).items() if inspect.isroutine(v) and not n.startswith("_")]
            raise RewardError(f"[reward] {source} has no function {name!r}{did_you_mean(name, own)}")
        target = getattr(target, part)
    if not callable(target):
        raise RewardError(f"[reward] {function} is of type {type(target).__name__}, not a function")
    return target


def _load_file(source: str) -> ModuleType:
    path = os.path.abspath(os.path.expanduser(source))
    if not os.path.isfile(path):
        folder = os.path.dirname(path)
        files = sorted(f for f in os.listdir(folder) if f.endswith(".py")) if os.path.isdir(folder) else []
        close = nearest(os.path.basename(path), files)
        raise RewardError(f"[reward] no file {path}" + (f"; did you mean {close!r}?" if close else ""))
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location(os.path.basename(path).removesuffix(".py"), path)
    if spec is None or spec.loader is None:
        raise RewardError(f"[reward] {path} is not a Python file (its name must end with .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # pickle and dataclasses look there; a module already in use stays
    spec.loader.exec_module(module)
    return module


def _load_module(source: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not (source == error.name or source.startswith(error.name + ".")):
            raise
        hint = f'; for a file write "{source}.py:NAME"' if "." not in source else ""
        raise RewardError(
            f"[reward] no module {error.name!r} can be imported from {os.getcwd()} or the installed packages{hint}"
        ) from None


def read_signature(function: Callable[..., Any]) -> Signature:
    """What the function takes. Raises RewardError for parameters that no keyword argument can fill."""
    required, optional, takes_all = [], [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise RewardError(
                f"[reward] parameter {parameter.name!r} is positional-only, but arguments are passed by name; "
                "remove the '/'"
            )
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_all = True
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            (required if parameter.default is parameter.empty else optional).append(parameter.name)
    return Signature(tuple(required), tuple(optional), takes_all)


def check_signature(signature: Signature, *, function: str, columns: Iterable[str], source: str) -> None:
    """Every required parameter must be `prompt`, `completion` or a column.

    Raises:
        RewardError: naming the parameters that nothing fills, and the columns of `source` (the data file).
    """
    columns = list(columns)
    unfilled = [name for name in signature.required if name not in (*GIVEN, *columns)]
    if not unfilled:
        return
    hints = [f"{name!r} -> {close!r}" for name in unfilled if (close := nearest(name, [*GIVEN, *columns]))]
    raise RewardError(
        f"[reward] {function} takes {', '.join(map(repr, unfilled))}, but a reward function gets prompt, completion "
        f"and the columns of {source}: {', '.join(columns)}" + (f"; did you mean {', '.join(hints)}?" if hints else "")
    )
