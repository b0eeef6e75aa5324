"""What an engine is asked for, and what it answers. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One completion to sample.

    Attributes:
        request_id: unique among the requests in flight.
        tokens: the prompt.
        seed: of this request's own random stream; None: the engine's.
    """

    request_id: str
    tokens: Sequence[int]
    max_new_tokens: int
    temperature: float
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled completion of R tokens; the end-of-sequence token is one of them.

    Attributes:
        tokens: int32 [R].
        logprobs: float32 [R], under the distribution that was sampled from (temperature applied).
        versions: int32 [R], policy version that sampled each token.
        finish_reason: one of types.FINISH_REASONS.
        seconds: from submission to the last token.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    seconds: float
