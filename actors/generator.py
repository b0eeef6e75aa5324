"""The rollout loop of one generator: tickets in, scored groups into the replay buffer.

    coordinator --tickets--> [ sample group_size rollouts -> score each ] --group--> buffer --acknowledged--+
         ^                                                                                                  |
         +------------------------------------- group_done -------------------------------------------------+

Async mode starts a group whenever enough rollout slots are free, so that up to `max_concurrent_rollouts` are in flight
at any time. Sync mode samples the whole share of a step as one batch, in ticket order, which makes it repeatable.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Sequence
from typing import Protocol, TypedDict

import numpy as np

from asyncrl.actors.busy import BusyClock
from asyncrl.actors.sampling import Sample, SampleRequest
from asyncrl.actors.scoring import RewardScorer, RolloutScorer, Tokenizer
from asyncrl.actors.tasks import finish, first_error, gather
from asyncrl.config import RLConfig
from asyncrl.errors import GenerationError, ReplayBufferError
from asyncrl.types import Group, Prompt, Rollout, Ticket

logger = logging.getLogger(__name__)

APPEND_ATTEMPTS = 3
MIN_SCORED = 2
"""A group with fewer scored rollouts has no baseline to learn from."""


class Coordinator(Protocol):
    """What the rollout loop needs of the run."""

    async def take_tickets(self, generator: str, *, num: int, engine_version: int) -> list[Ticket] | None:
        """Blocks until a ticket may be given, or for about a second (then []); None: the run is over."""
        ...

    async def group_done(self, generator: str, *, number: int, failed: str | None) -> None:
        """The buffer acknowledged the group (None), or it could not be made (the cause)."""
        ...


class SamplingEngine(Protocol):
    """asyncrl.actors.engine.Engine, as far as the rollout loop uses it."""

    version: int
    num_updates: int
    update_s: float

    @property
    def dead(self) -> bool: ...
    async def sample(
        self, request_id: str, tokens: Sequence[int], *, max_new_tokens: int, temperature: float, seed: int | None
    ) -> Sample: ...
    async def sample_batch(self, requests: Sequence[SampleRequest]) -> list[Sample]: ...


class GroupStore(Protocol):
    """asyncrl.buffer.ReplayBuffer."""

    def append(self, group: Group) -> bool: ...


class EvalResult(TypedDict):
    """Means over the scored rollouts (0 without any); versions are those of the engine over all sampled tokens."""

    reward: float
    length: float
    min_version: int
    max_version: int
    num_scored: int
    num_failed: int


class Generator:
    """Keeps one engine busy. Belongs to the engine's event loop."""

    def __init__(
        self,
        engine: SamplingEngine,
        *,
        name: str,
        buffer: GroupStore,
        coordinator: Coordinator,
        scorer: RewardScorer,
        tokenizer: Tokenizer,
        config: RLConfig,
    ) -> None:
        self._engine = engine
        self._name = name
        self._buffer = buffer
        self._coordinator = coordinator
        self._scoring = RolloutScorer(scorer, tokenizer)
        self._config = config
        self._slot_freed = asyncio.Event()
        self._reserved = 0
        self._num_requests = 0
        self._counters = {"generated_tokens": 0, "finished_rollouts": 0, "failed_rollouts": 0}
        self._busy = BusyClock()

    async def run(self) -> None:
        """Take tickets until the run is over, then finish what was started.

        A rollout or a group that fails is reported and costs only itself.

        Raises:
            GenerationError: the engine died.
            ReplayBufferError: the buffer could not be reached.
        """
        try:
            async with asyncio.TaskGroup() as groups:
                while (tickets := await self._take_tickets()) is not None:
                    if self._config.mode == "sync":
                        await self._sample_together(tickets)
                    else:
                        for ticket in tickets:
                            self._reserved += ticket.group_size
                            groups.create_task(self._make_group(ticket))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    async def evaluate(self, prompts: Sequence[Prompt], *, samples_per_prompt: int, seed: int) -> EvalResult:
        """Sample and score held-out prompts, beside whatever else is in flight (in sync mode nothing is).

        Raises:
            GenerationError: the engine died.
        """
        asked = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
        requests = [self._request(prompt, seed=seed + i) for i, prompt in enumerate(asked)]
        if self._config.mode == "sync":
            with self._busy.count(len(requests)):
                samples: list[Sample | GenerationError] = list(await self._engine.sample_batch(requests))
        else:
            samples = await gather(*(self._sample(request) for request in requests))
        rollouts = await gather(*(self._scoring.score(p, s) for p, s in zip(asked, samples, strict=True)))
        sampled = [r for r in rollouts if isinstance(r, Rollout)]
        scored = [r for r in sampled if not math.isnan(r.reward)]
        versions = [v for r in sampled for v in r.policy_versions.tolist()] or [self._engine.version]
        return EvalResult(
            reward=float(np.mean([r.reward for r in scored])) if scored else 0.0,
            length=float(np.mean([r.response.size for r in scored])) if scored else 0.0,
            min_version=min(versions),
            max_version=max(versions),
            num_scored=len(scored),
            num_failed=len(rollouts) - len(scored),
        )

    def stats(self) -> dict[str, float]:
        """Cumulative counters; `running` is the number of rollouts in the engine now.

        Evaluation counts as busy time, its tokens and rollouts are not counted.
        """
        busy_s, idle_s = self._busy.seconds()
        return {
            **self._counters,
            "busy_s": busy_s,
            "idle_s": idle_s,
            "running": self._busy.running,
            "updates": self._engine.num_updates,
            "update_s": self._engine.update_s,
        }

    async def _take_tickets(self) -> list[Ticket] | None:
        group_size = self._config.algorithm.group_size
        while (free := self._config.generators.max_concurrent_rollouts - self._reserved) < group_size:
            self._slot_freed.clear()
            await self._slot_freed.wait()
        return await self._coordinator.take_tickets(
            self._name, num=free // group_size, engine_version=self._engine.version
        )

    async def _make_group(self, ticket: Ticket) -> None:
        """Async mode: the rollouts of one ticket go their own way, each slot is free after its last token."""
        rollouts = await gather(*(self._rollout(ticket.prompt, ticket.seed + i) for i in range(ticket.group_size)))
        await self._deliver(ticket, rollouts)

    async def _rollout(self, prompt: Prompt, seed: int) -> Rollout | GenerationError:
        try:
            sample = await self._sample(self._request(prompt, seed=seed))
        finally:
            self._reserved -= 1
            self._slot_freed.set()
        return await self._scoring.score(prompt, sample)

    async def _sample_together(self, tickets: Sequence[Ticket]) -> None:
        """Sync mode: one batch; groups are appended in ticket order."""
        asked = [(ticket.prompt, ticket.seed + i) for ticket in tickets for i in range(ticket.group_size)]
        if not asked:
            return
        with self._busy.count(len(asked)):
            samples = await self._engine.sample_batch([self._request(prompt, seed=seed) for prompt, seed in asked])
        rollouts = iter(await gather(*(self._scoring.score(p, s) for (p, _), s in zip(asked, samples, strict=True))))
        for ticket in tickets:
            await self._deliver(ticket, [next(rollouts) for _ in range(ticket.group_size)])

    def _request(self, prompt: Prompt, *, seed: int) -> SampleRequest:
        self._num_requests += 1
        generators = self._config.generators
        return SampleRequest(
            request_id=f"{self._name}-{self._num_requests}",
            tokens=prompt.tokens,
            max_new_tokens=generators.max_new_tokens,
            temperature=generators.temperature,
            seed=seed,
        )

    async def _sample(self, request: SampleRequest) -> Sample | GenerationError:
        """A sample, or why the engine refused this one."""
        try:
            with self._busy.count(1):
                return await self._engine.sample(
                    request.request_id,
                    request.tokens,
                    max_new_tokens=request.max_new_tokens,
                    temperature=request.temperature,
                    seed=request.seed,
                )
        except GenerationError as error:
            if self._engine.dead:
                raise
            return error

    async def _deliver(self, ticket: Ticket, rollouts: Sequence[Rollout | GenerationError]) -> None:
        """Append the group and report it; or report why there is none."""
        sampled = [r for r in rollouts if isinstance(r, Rollout)]
        num_scored = sum(not math.isnan(r.reward) for r in sampled)
        self._counters["generated_tokens"] += sum(r.response.size for r in sampled)
        self._counters["finished_rollouts"] += num_scored
        self._counters["failed_rollouts"] += len(rollouts) - num_scored
        failed = None
        if len(sampled) < len(rollouts) or num_scored < MIN_SCORED:
            causes = [str(r) if isinstance(r, GenerationError) else r.error for r in rollouts]
            cause = next((c for c in causes if c), "no error was recorded")
            failed = f"{num_scored} of {len(rollouts)} rollouts of {ticket.prompt.prompt_id} were scored; {cause}"
            logger.warning("group %d failed: %s", ticket.number, failed)
        else:
            await finish(self._append(self._group(ticket, sampled)))
        await self._coordinator.group_done(self._name, number=ticket.number, failed=failed)

    def _group(self, ticket: Ticket, rollouts: Sequence[Rollout]) -> Group:
        return Group(
            group_id=uuid.uuid4().bytes,
            number=ticket.number,
            prompt_id=ticket.prompt.prompt_id,
            prompt_tokens=np.asarray(ticket.prompt.tokens, dtype=np.int32),
            rollouts=tuple(rollouts),
            generator=self._name,
            created_at=time.time(),
        )

    async def _append(self, group: Group) -> None:
        for attempt in range(1, APPEND_ATTEMPTS + 1):
            try:
                await asyncio.to_thread(self._buffer.append, group)  # repeating it is harmless
                return
            except ReplayBufferError as error:
                if attempt == APPEND_ATTEMPTS:
                    raise
                logger.warning("group %d was not acknowledged, trying again: %s", group.number, error)
