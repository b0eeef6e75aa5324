"""How the coordinator sees the ranks: one answer, and of several errors the cause."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from asyncrl import coordinator_actor
from asyncrl.coordinator_actor import _first_answer
from asyncrl.errors import ReplayBufferError


async def call(after_s: float, result: Any) -> Any:
    await asyncio.sleep(after_s)
    if isinstance(result, BaseException):
        raise result
    return result


def test_rank_0_answers_when_all_have() -> None:
    async def main() -> Any:
        return await _first_answer([call(0.0, "rank 0"), call(0.05, "rank 1")])

    assert asyncio.run(main()) == "rank 0"


@pytest.mark.parametrize("cause", [ActorDiedError(), ReplayBufferError("a group is damaged")])
def test_the_cause_is_raised_although_another_rank_complains_first(cause: Exception) -> None:
    async def main() -> None:
        await _first_answer([call(0.0, RuntimeError("connection closed by peer")), call(0.05, cause)])

    with pytest.raises(type(cause)):
        asyncio.run(main())


def test_a_rank_that_hangs_in_a_collective_does_not_hide_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_actor, "OTHER_ERRORS_S", 0.1)

    async def main() -> None:
        await _first_answer([call(60.0, "never"), call(0.0, RuntimeError("no memory"))])

    started = time.monotonic()
    with pytest.raises(RuntimeError, match="no memory"):
        asyncio.run(main())
    assert time.monotonic() - started < 5
