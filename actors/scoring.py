"""From a sample to a rollout with its reward."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from asyncrl.actors.sampling import Sample
from asyncrl.errors import GenerationError, RewardError
from asyncrl.types import Prompt, Rollout

logger = logging.getLogger(__name__)

NUM_REPORTED = 20


class Scored(Protocol):
    @property
    def reward(self) -> float: ...
    @property
    def parts(self) -> dict[str, float]: ...


class RewardScorer(Protocol):
    """asyncrl.rewards.Scorer."""

    async def score(self, prompt: Prompt, completion: str) -> Scored: ...


class Tokenizer(Protocol):
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class RolloutScorer:
    """Turns token ids into text and asks the reward function. A failure is recorded in the rollout, not raised."""

    def __init__(self, scorer: RewardScorer, tokenizer: Tokenizer) -> None:
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._reported: set[str] = set()

    async def score(self, prompt: Prompt, sample: Sample | GenerationError) -> Rollout | GenerationError:
        """The rollout with its reward, or with NaN and the cause when it has none."""
        if isinstance(sample, GenerationError):
            return sample
        if not sample.tokens.size:
            return GenerationError(f"the engine ended {prompt.prompt_id} with {sample.finish_reason} before any token")
        reward, parts, error = math.nan, {}, None
        if sample.finish_reason in ("abort", "error"):
            error = f"sampling ended with {sample.finish_reason}"
        else:
            try:
                score = await self._scorer.score(
                    prompt, self._tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=True)
                )
                reward, parts = score.reward, score.parts
            except RewardError as failure:
                error = str(failure)
                self._report(error, prompt)
        return Rollout(
            response=sample.tokens,
            loss_mask=np.ones(sample.tokens.size, dtype=bool),
            behaviour_logprobs=sample.logprobs,
            policy_versions=sample.versions,
            reward=reward,
            reward_parts=parts,
            finish_reason="error" if error else sample.finish_reason,
            seconds=sample.seconds,
            error=error,
        )

    def _report(self, error: str, prompt: Prompt) -> None:
        """Log each cause once, the first NUM_REPORTED of them."""
        if error not in self._reported and len(self._reported) < NUM_REPORTED:
            self._reported.add(error)
            logger.warning("a rollout of %s has no reward and is not trained on: %s", prompt.prompt_id, error)
