"""Scores completions in reward processes, so that whatever a reward function does costs one rollout at most.

A call that raises, takes too long, crashes its process or returns something that is not a reward is a RewardError of
that call. A process that hung or died is started again at its next call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncrl.errors import RewardError
from asyncrl.rewards.loading import Signature

if TYPE_CHECKING:
    from asyncrl.config import RewardConfig
    from asyncrl.types import Prompt

START_TIMEOUT_S = 120.0  # importing the user's module may load a model
GRACE_S = 0.05
MAX_LINE_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class Score:
    """A reward and its named parts (none if the function returned a plain number)."""

    reward: float
    parts: dict[str, float]


class Scorer:
    """A pool of reward processes. Belongs to the event loop that calls `start`; call `close` at the end.

    Example:
        scorer = Scorer(RewardConfig(function="asyncrl.rewards:exact_match"))
        await scorer.start()
        await scorer.score(prompt, "023489")  # Score(reward=1.0, parts={})
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._workers = [_Worker(config) for _ in range(config.num_workers)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._closed = False

    async def start(self) -> Signature:
        """Start all processes; returns what the function takes.

        Raises:
            RewardError: the function cannot be imported.
        """
        try:
            signatures = await asyncio.gather(*(worker.start() for worker in self._workers))
        except BaseException:
            await self.close()
            raise
        for worker in self._workers:
            self._idle.put_nowait(worker)
        return signatures[0]

    async def score(self, prompt: Prompt, completion: str) -> Score:
        """Call the reward function. The time limit begins when a process is free.

        Raises:
            RewardError: the call raised, hung, crashed or returned something else than a finite reward.
        """
        arguments = {**prompt.row, "prompt": prompt.text, "completion": completion}
        worker = await self._idle.get()
        try:
            if self._closed:
                raise RewardError("the scorer is closed")
            reply = await worker.call(arguments)
        except RewardError:
            if self._closed:
                raise RewardError("the scorer is closed") from None
            raise
        finally:
            self._idle.put_nowait(worker)
        if "error" in reply:
            raise RewardError(f"[reward] {self._config.function} {reply['error']}")
        return Score(reward=reply["reward"], parts=reply["parts"])

    async def close(self) -> None:
        """End all processes and what they started. Calls in flight raise RewardError."""
        self._closed = True
        await asyncio.gather(*(worker.stop(for_good=True) for worker in self._workers))


class _Worker:
    """One reward process and its pipes."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._process: Process | None = None
        self._stopped = False

    async def start(self) -> Signature:
        folder = os.path.expanduser(self._config.folder or os.getcwd())
        if not os.path.isdir(folder):
            raise RewardError(f"[reward] folder = {folder!r}: no such folder on {socket.gethostname()}")
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "asyncrl.rewards.worker"),
            *(self._config.function, str(self._config.memory_limit_mb)),
            cwd=folder,
            stdin=PIPE,
            stdout=PIPE,
            stderr=None if sys.stderr is not None else DEVNULL,
            start_new_session=True,
            limit=MAX_LINE_BYTES,
        )
        if self._stopped:  # while the process was being made
            await self.stop()
            raise RewardError("the scorer is closed")
        reply = await self._reply(START_TIMEOUT_S, "importing it")
        if "error" in reply:
            await self.stop()
            raise RewardError(reply["error"])
        required, optional, takes_all = reply["signature"]
        return Signature(tuple(required), tuple(optional), takes_all)

    async def call(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """One call. The process is ended if it did not answer, so that no late answer meets the next question."""
        if self._process is None:
            await self.start()
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"arguments": arguments}).encode() + b"\n")
            return await self._reply(self._config.timeout_s, "the call")
        except BaseException:
            await self.stop()
            raise

    async def _reply(self, timeout_s: float, what: str) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdout is not None
        reading = asyncio.ensure_future(process.stdout.readline())
        try:
            done, _ = await asyncio.wait({reading}, timeout=timeout_s)
            if not done:  # after a pause of this event loop the answer may be there, but not yet read
                done, _ = await asyncio.wait({reading}, timeout=GRACE_S)
        finally:
            if not reading.done():
                reading.cancel()
        function = self._config.function
        if not done:
            await self.stop()
            limit = "[reward] timeout_s" if what == "the call" else "the limit"
            raise RewardError(f"[reward] {function} took too long: {what} was ended after {timeout_s:g} s ({limit})")
        if not reading.result():
            status = await process.wait()
            await self.stop()
            raise RewardError(f"[reward] {function} ended its process during {what} ({_status(status)})")
        return json.loads(reading.result())

    async def stop(self, *, for_good: bool = False) -> None:
        """End the process and what it started. It comes back with the next call, unless it ended for good."""
        self._stopped |= for_good
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _status(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    return f"signal {-code}, {signal.Signals(-code).name}; out of memory, or a crash in native code"
