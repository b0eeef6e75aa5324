"""Waiting for another process, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], *, within_s: float, what: Callable[[], str]) -> None:
    """Poll until the condition holds; an AssertionError says what() after the deadline."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)
