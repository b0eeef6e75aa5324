"""The one error family of asyncrl.

A message says what is wrong, the value, where it came from and how to fix it. Anything that is not one of these is a
bug in asyncrl and is reported with its traceback; one of these is reported as its message alone.
"""


class AsyncRLError(Exception):
    """Base of every error that asyncrl raises on purpose."""


class ConfigError(AsyncRLError):
    """A configuration cannot be used. Holds every problem found, not only the first.

    Attributes:
        problems: one complete sentence each, with file:line where there is one.
    """

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[str]]]:
        return type(self), (self.problems,)


class DataError(AsyncRLError):
    """A data file is missing, empty, malformed or lacks a column."""


class RewardError(AsyncRLError):
    """A reward function cannot be imported, raised, hung, or returned something that is not a reward."""


class GenerationError(AsyncRLError):
    """The engine failed or refused a request."""


class WeightSyncError(AsyncRLError):
    """New weights did not arrive whole: wrong manifest, wrong checksum, not finite."""


class ReplayBufferError(AsyncRLError):
    """The replay buffer refused an operation or could not be reached."""


class CheckpointError(AsyncRLError):
    """A model folder could not be written or read."""
