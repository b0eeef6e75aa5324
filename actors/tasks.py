"""Small helpers around asyncio tasks: nothing is left running, and the first error comes out as itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end even when the caller is cancelled, and only then let the cancellation through."""
    task = asyncio.ensure_future(coroutine)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def first_error(error: BaseException) -> BaseException:
    """The first error inside the (nested) exception groups that task groups raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def gather(*coroutines: Coroutine[Any, Any, T]) -> list[T]:
    """Results in order. The first error, or a cancellation, cancels the others and waits for them."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return [task.result() for task in tasks]
