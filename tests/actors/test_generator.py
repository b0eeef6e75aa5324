"""The rollout loop: tickets, scoring, groups, failures. A fake engine stands in where a fault cannot be produced."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from asyncrl.actors.busy import BusyClock
from asyncrl.actors.generator import Generator
from asyncrl.actors.sampling import Sample, SampleRequest
from asyncrl.buffer import ReplayBuffer
from asyncrl.config import AlgorithmConfig, GeneratorsConfig, ModelConfig, PromptsConfig, RewardConfig, RLConfig
from asyncrl.errors import GenerationError, ReplayBufferError, RewardError
from asyncrl.types import Group, Prompt, Rollout, Ticket

GROUP_SIZE = 4
MAX_CONCURRENT = 10
REFUSED = 13
"""A prompt that starts with this token is refused by the fake engine."""


class FakeEngine:
    """Answers with the seed as the only token, after `pause` iterations of the event loop."""

    def __init__(self, *, pause: Callable[[int], int] = lambda seed: 1 + seed % 3) -> None:
        self.version, self.num_updates, self.update_s = 7, 2, 0.5
        self.dead = False
        self.in_flight = self.most_in_flight = 0
        self.requests: list[SampleRequest] = []
        self.finish_reason = "stop"
        self._pause = pause

    async def sample(
        self, request_id: str, tokens: Sequence[int], *, max_new_tokens: int, temperature: float, seed: int | None
    ) -> Sample:
        assert seed is not None
        self.requests.append(SampleRequest(request_id, tokens, max_new_tokens, temperature, seed))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            for _ in range(self._pause(seed)):
                await asyncio.sleep(0)
                if self.dead:
                    raise GenerationError("the vLLM engine died")
        finally:
            self.in_flight -= 1
        if tokens[0] == REFUSED:
            raise GenerationError("the prompt is too long")
        one = np.ones(1)
        return Sample(
            np.asarray([seed], np.int32), -one.astype(np.float32), 7 * one.astype(np.int32), self.finish_reason, 0.1
        )

    async def sample_batch(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        return [
            await self.sample(r.request_id, r.tokens, max_new_tokens=1, temperature=1.0, seed=r.seed) for r in requests
        ]


@dataclass(frozen=True)
class FakeScore:
    reward: float
    parts: dict[str, float] = field(default_factory=dict)


class FakeScorer:
    """The reward is the number that the text says; numbers in `failing` raise."""

    def __init__(self, failing: Sequence[int] = ()) -> None:
        self.failing = set(failing)

    async def score(self, prompt: Prompt, completion: str) -> FakeScore:
        await asyncio.sleep(0)
        if int(completion) in self.failing:
            raise RewardError(f"no reward for {completion}")
        return FakeScore(float(completion), {"number": float(completion)})


class FakeTokenizer:
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return " ".join(map(str, token_ids))


class FakeCoordinator:
    """Hands out the tickets as they are asked for, then says that the run is over."""

    def __init__(self, tickets: Sequence[Ticket], *, share: int | None = None) -> None:
        self.tickets = list(tickets)
        self.asked: list[int] = []
        self.engine_versions: list[int] = []
        self.done: list[tuple[int, str | None]] = []
        self._share = share

    async def take_tickets(self, generator: str, *, num: int, engine_version: int) -> list[Ticket] | None:
        self.asked.append(num)
        self.engine_versions.append(engine_version)
        await asyncio.sleep(0)
        if not self.tickets:
            return None
        count = self._share or num
        taken, self.tickets = self.tickets[:count], self.tickets[count:]
        return taken

    async def group_done(self, generator: str, *, number: int, failed: str | None) -> None:
        self.done.append((number, failed))


class EndlessCoordinator(FakeCoordinator):
    """Never has a ticket and never ends."""

    async def take_tickets(self, generator: str, *, num: int, engine_version: int) -> list[Ticket] | None:
        if self.tickets:
            return await super().take_tickets(generator, num=num, engine_version=engine_version)
        await asyncio.Event().wait()
        return []


class ListBuffer:
    """Keeps what is appended; fails as often as it is told to."""

    def __init__(self, *, failures: int = 0) -> None:
        self.groups: list[Group] = []
        self.failures = failures

    def append(self, group: Group) -> bool:
        if self.failures:
            self.failures -= 1
            raise ReplayBufferError("no answer")
        self.groups.append(group)
        return True


def prompt(number: int, first_token: int = 3) -> Prompt:
    return Prompt(prompt_id=f"prompts:{number}", tokens=[first_token, 4, 5], text="1", row={"answer": "1"})


def ticket(number: int, **kwargs: int) -> Ticket:
    return Ticket(number=number, prompt=prompt(number, **kwargs), group_size=GROUP_SIZE, seed=100 * (number + 1))


def config(mode: str = "async") -> RLConfig:
    return RLConfig(
        job="rl",
        name="test",
        steps=1,
        mode=mode,  # type: ignore[arg-type]
        model=ModelConfig(path="model"),
        data=PromptsConfig(train="train.jsonl"),
        reward=RewardConfig(function="asyncrl.rewards:exact_match"),
        algorithm=AlgorithmConfig(name="grpo", group_size=GROUP_SIZE),
        generators=GeneratorsConfig(max_concurrent_rollouts=MAX_CONCURRENT, max_new_tokens=9, temperature=0.5),
    )


@dataclass
class Setup:
    engine: FakeEngine = field(default_factory=FakeEngine)
    coordinator: FakeCoordinator = field(default_factory=lambda: FakeCoordinator([]))
    scorer: FakeScorer = field(default_factory=FakeScorer)
    buffer: ListBuffer = field(default_factory=ListBuffer)
    mode: str = "async"

    def generator(self) -> Generator:
        return Generator(
            self.engine,
            name="generator-0",
            buffer=self.buffer,
            coordinator=self.coordinator,
            scorer=self.scorer,
            tokenizer=FakeTokenizer(),
            config=config(self.mode),
        )

    def run(self) -> Generator:
        async def main() -> Generator:
            generator = self.generator()
            async with asyncio.timeout(20):
                await generator.run()
            return generator

        return asyncio.run(main())


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_every_ticket_becomes_one_whole_group(mode: str) -> None:
    setup = Setup(coordinator=FakeCoordinator([ticket(i) for i in range(7)]), mode=mode)
    stats = setup.run().stats()
    groups = {group.number: group for group in setup.buffer.groups}
    assert sorted(groups) == list(range(7)) and len(setup.buffer.groups) == 7
    assert sorted(setup.coordinator.done) == [(i, None) for i in range(7)]
    group = groups[2]
    assert [r.response.tolist() for r in group.rollouts] == [[300], [301], [302], [303]]  # ticket.seed + i
    assert [r.reward for r in group.rollouts] == [300, 301, 302, 303]
    assert group.rollouts[1].reward_parts == {"number": 301}
    assert group.prompt_tokens.tolist() == [3, 4, 5] and group.min_version == 7
    assert (group.prompt_id, group.generator, len(group.group_id)) == ("prompts:2", "generator-0", 16)
    assert len({g.group_id for g in setup.buffer.groups}) == 7
    assert stats["finished_rollouts"] == stats["generated_tokens"] == 28
    assert (stats["failed_rollouts"], stats["running"], stats["updates"], stats["update_s"]) == (0, 0, 2, 0.5)


def test_requests_carry_the_sampling_settings_and_their_own_names() -> None:
    setup = Setup(coordinator=FakeCoordinator([ticket(0), ticket(1)]))
    setup.run()
    assert len({r.request_id for r in setup.engine.requests}) == 8
    assert {(r.max_new_tokens, r.temperature) for r in setup.engine.requests} == {(9, 0.5)}
    assert set(setup.coordinator.engine_versions) == {7}


def test_rollouts_in_flight_are_bounded_and_slots_are_refilled() -> None:
    setup = Setup(
        coordinator=FakeCoordinator([ticket(i) for i in range(40)]), engine=FakeEngine(pause=lambda s: s % 11)
    )
    setup.run()
    assert setup.engine.most_in_flight <= MAX_CONCURRENT
    assert setup.engine.most_in_flight > GROUP_SIZE  # more than one group at a time
    assert max(setup.coordinator.asked) == MAX_CONCURRENT // GROUP_SIZE and min(setup.coordinator.asked) >= 1


def test_a_slow_rollout_does_not_hold_the_slots_of_its_group() -> None:
    slow = FakeEngine(pause=lambda seed: 2000 if seed == 100 else 1)
    setup = Setup(coordinator=FakeCoordinator([ticket(i) for i in range(6)]), engine=slow)
    setup.run()
    assert [number for number, _ in setup.coordinator.done][-1] == 0


def test_sync_mode_samples_its_share_in_order_and_appends_in_ticket_order() -> None:
    setup = Setup(coordinator=FakeCoordinator([ticket(i) for i in range(6)], share=3), mode="sync")
    setup.run()
    assert [r.seed for r in setup.engine.requests[:6]] == [100, 101, 102, 103, 200, 201]
    assert [group.number for group in setup.buffer.groups] == list(range(6))


def test_a_rollout_that_cannot_be_scored_stays_in_its_group() -> None:
    setup = Setup(coordinator=FakeCoordinator([ticket(0)]), scorer=FakeScorer(failing=[101]))
    stats = setup.run().stats()
    good, bad = setup.buffer.groups[0].rollouts[:2]
    assert (good.reward, good.error, good.finish_reason) == (100, None, "stop")
    assert math.isnan(bad.reward) and bad.error == "no reward for 101" and bad.finish_reason == "error"
    assert bad.response.tolist() == [101] and bad.reward_parts == {}
    assert (stats["finished_rollouts"], stats["failed_rollouts"]) == (3, 1)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_group_with_fewer_than_two_scored_rollouts_is_reported_and_not_appended(mode: str) -> None:
    setup = Setup(
        coordinator=FakeCoordinator([ticket(0), ticket(1)]), scorer=FakeScorer(failing=[101, 102, 103]), mode=mode
    )
    setup.run()
    assert [group.number for group in setup.buffer.groups] == [1]
    failed = dict(setup.coordinator.done)[0]
    assert failed is not None and "1 of 4" in failed and "no reward for 101" in failed


def test_a_refused_prompt_fails_its_group_only() -> None:
    setup = Setup(coordinator=FakeCoordinator([ticket(0, first_token=REFUSED), ticket(1)]))
    setup.run()
    assert [group.number for group in setup.buffer.groups] == [1]
    assert "the prompt is too long" in str(dict(setup.coordinator.done)[0])


def test_an_aborted_rollout_is_not_scored() -> None:
    setup = Setup(coordinator=FakeCoordinator([ticket(0)]))
    setup.engine.finish_reason = "abort"
    setup.run()
    assert not setup.buffer.groups
    assert "sampling ended with abort" in str(setup.coordinator.done[0][1])


def test_an_append_without_acknowledgement_is_repeated() -> None:
    setup = Setup(coordinator=FakeCoordinator([ticket(0)]), buffer=ListBuffer(failures=2))
    setup.run()
    assert setup.coordinator.done == [(0, None)] and len(setup.buffer.groups) == 1


def test_a_buffer_that_stays_away_ends_the_run() -> None:
    setup = Setup(coordinator=EndlessCoordinator([ticket(0)]), buffer=ListBuffer(failures=100))
    with pytest.raises(ReplayBufferError, match="no answer"):
        setup.run()
    assert setup.coordinator.done == []


def test_a_dead_engine_ends_the_run_and_leaves_no_task() -> None:
    setup = Setup(coordinator=EndlessCoordinator([ticket(0), ticket(1)]), engine=FakeEngine(pause=lambda seed: 10**6))

    async def main() -> set[asyncio.Task]:
        running = asyncio.create_task(setup.generator().run())
        while setup.engine.in_flight < 2 * GROUP_SIZE:
            await asyncio.sleep(0)
        setup.engine.dead = True
        with pytest.raises(GenerationError, match="died"):
            await running
        return asyncio.all_tasks()

    assert len(asyncio.run(main())) == 1
    assert setup.engine.in_flight == 0 and not setup.buffer.groups


def test_cancelling_the_run_leaves_nothing_in_flight() -> None:
    setup = Setup(coordinator=EndlessCoordinator([ticket(0), ticket(1)]), engine=FakeEngine(pause=lambda seed: 10**6))

    async def main() -> set[asyncio.Task]:
        running = asyncio.create_task(setup.generator().run())
        while setup.engine.in_flight < 2 * GROUP_SIZE:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return asyncio.all_tasks()

    assert len(asyncio.run(main())) == 1
    assert setup.engine.in_flight == 0


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_evaluation_reports_means_over_scored_rollouts(mode: str) -> None:
    setup = Setup(scorer=FakeScorer(failing=[11]), mode=mode)
    prompts = [prompt(0), prompt(1)]
    result = asyncio.run(setup.generator().evaluate(prompts, samples_per_prompt=2, seed=10))
    assert sorted(r.seed or 0 for r in setup.engine.requests) == [10, 11, 12, 13]
    assert result == {
        "reward": pytest.approx((10 + 12 + 13) / 3),
        "length": 1.0,
        "min_version": 7,
        "max_version": 7,
        "num_scored": 3,
        "num_failed": 1,
    }


def test_groups_reach_a_real_buffer() -> None:
    setup = Setup(coordinator=FakeCoordinator([ticket(0), ticket(1)]), scorer=FakeScorer(failing=[201]))
    with ReplayBuffer.local() as buffer:
        setup.buffer = buffer  # type: ignore[assignment]
        setup.run()
        lease = buffer.lease(2, policy_version=7, max_staleness=0)
        assert lease is not None
        rollouts: list[Rollout] = [r for group in buffer.read(lease.refs) for r in group.rollouts]
    assert [r.response.tolist() for r in rollouts] == [[s] for s in (100, 101, 102, 103, 200, 201, 202, 203)]
    assert [math.isnan(r.reward) for r in rollouts] == [False] * 5 + [True] + [False] * 2


def test_busy_time_is_time_with_a_rollout_in_flight() -> None:
    now = 0.0
    clock = BusyClock(lambda: now)
    now = 1.0
    with clock.count(2):
        now = 3.0
        with clock.count(1):
            assert clock.running == 3
            now = 4.0
    now = 9.0
    assert clock.seconds() == (3.0, 6.0) and clock.running == 0
