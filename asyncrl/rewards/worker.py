"""The process that runs a user's reward function: `python -m asyncrl.rewards.worker FUNCTION MEMORY_MB`.

One JSON object a line, in on stdin and out on stdout:

    unasked, when it has started:  <- {"signature": [required, optional, takes_all]} or {"error": "..."} and the end
    -> {"arguments": {...}}        <- {"reward": 1.0, "parts": {...}} or {"error": "..."}

What the user's code prints goes to stderr. The process ends, with everything it started, when its stdin closes: also
when the parent was killed, and also in the middle of a call.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import inspect
import json
import math
import os
import queue
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import IO, Any

from asyncrl.errors import AsyncRLError
from asyncrl.rewards.loading import load_function, read_signature

ACCEPTED = "a finite number, or a dict of name -> finite number"
LARGEST = 3.4e38  # rewards are stored as float32
MAX_ERROR_CHARACTERS = 4000
_NOT_THE_USERS = (
    os.path.dirname(os.path.abspath(__file__)),
    os.path.dirname(asyncio.__file__),
    os.path.dirname(str(importlib.__file__)),
    "<frozen importlib",
)


def main(function_name: str, memory_mb: int) -> None:
    requests, replies = _take_pipes()
    calls: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests, calls), daemon=True).start()
    memory_bytes = memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    with asyncio.Runner() as runner:
        try:
            function = load_function(function_name)
            signature = read_signature(function)
        except BaseException as error:  # noqa: BLE001 (whatever happens in the user's module is reported, also exit())
            own = isinstance(error, AsyncRLError)
            reply({"error": f"{'' if own else f'[reward] importing {function_name} '}{_describe(error, memory_mb)}"})
            return
        reply({"signature": dataclasses.astuple(signature)})
        while True:
            arguments = json.loads(calls.get())["arguments"]
            try:
                message = _call(function, signature.select(arguments), runner)
            except BaseException as error:  # noqa: BLE001 (a reward that calls exit() costs its rollout as any other)
                message = {"error": _describe(error, memory_mb)}
            reply(message)


def _take_pipes() -> tuple[IO[str], IO[str]]:
    """Keep stdin and stdout for the protocol: users' code reads nothing and prints to stderr."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8", newline="\n")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # not only the same place: also nothing is held back when the process is killed
    return requests, replies


def _read_requests(requests: IO[str], calls: queue.SimpleQueue[str]) -> None:
    for line in requests:
        calls.put(line)
    if os.getpgrp() == os.getpid():  # so the scorer starts it: take along what the user's code has started
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _call(function: Callable[..., Any], arguments: dict[str, Any], runner: asyncio.Runner) -> dict[str, Any]:
    value = function(**arguments)
    if inspect.isawaitable(value):
        value = runner.run(_await(value))
    if not isinstance(value, dict):
        return {"reward": _number(value, value), "parts": {}}
    if not value or not all(isinstance(name, str) for name in value):
        raise AsyncRLError(f"returned {_short(value)}; accepted: {ACCEPTED}")
    parts = {name: _number(part, value) for name, part in value.items()}
    return {"reward": _number(sum(parts.values()), value), "parts": parts}


async def _await(value: Any) -> Any:
    return await value


def _number(part: Any, returned: Any) -> float:
    scalar = part.item() if getattr(part, "ndim", None) == 0 and hasattr(part, "item") else part  # numpy, torch
    if isinstance(scalar, bool | int | float):
        try:
            number = float(scalar)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and abs(number) <= LARGEST:
            return number
    raise AsyncRLError(f"returned {_short(returned)}; accepted: {ACCEPTED}")


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 200 else text[:197] + '...'} ({type(value).__name__})"


def _describe(error: BaseException, memory_mb: int) -> str:
    """The message of an own error; of any other the user's part of the traceback."""
    if isinstance(error, AsyncRLError):
        return str(error)
    if isinstance(error, MemoryError):
        return f"needed more memory than [reward] memory_limit_mb = {memory_mb} allows"
    frames = traceback.extract_tb(error.__traceback__)
    while frames and frames[0].filename.startswith(_NOT_THE_USERS):
        del frames[0]
    shown = "".join(frames.format())
    if isinstance(error, SyntaxError):
        shown += "".join(traceback.format_exception_only(error)[:-1])
    message, shown = f"{type(error).__name__}: {error}".removesuffix(": "), shown.rstrip()[-MAX_ERROR_CHARACTERS:]
    return f"raised {message}" + (f"\n{shown}" if shown else "")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
