"""SIGINT and SIGTERM as requests to stop: Ctrl-C, and what Slurm, Kubernetes and docker send."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Use as a context manager in the main thread. A signal raises KeyboardInterrupt, except the first one inside
    `deferred()`, which is only counted: an exception out of nowhere may be lost in a callback of a library.

    A SIGINT that the process was started to ignore (`command &` in a script) stays ignored; SIGTERM never is.

    Attributes:
        count: signals so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._deferred = False

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self.install()
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Also after a library, such as Ray, has put its own handlers in place."""
        for number in SIGNALS:
            if number == signal.SIGTERM or self._before[number] is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def ignore(self) -> None:
        """From now on, until the context is left: what is left to do must not be cut short."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """The caller looks at `count`."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if not self._deferred or self.count > 1:
            raise KeyboardInterrupt
