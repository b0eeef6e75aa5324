"""The coordinator with a real buffer and stand-ins for engines and ranks, to show faults and orders at will."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.buffer import ReplayBuffer
from asyncrl.config import RLConfig
from asyncrl.coordinator import Coordinator
from asyncrl.errors import GenerationError, WeightSyncError
from asyncrl.metrics import JsonlSink, Metrics
from asyncrl.progress import Progress
from asyncrl.run_folder import RunFolder
from asyncrl.types import Group, GroupRef, Prompt, Rollout, Ticket

PROMPTS = [Prompt(prompt_id=f"p:{i}", tokens=[i], text=str(i), row={}) for i in range(7)]


def make_config(**top: Any) -> RLConfig:
    return RLConfig(
        **{
            "job": "rl",
            "name": "test",
            "steps": 5,
            "model": {"path": "m"},
            "data": {"train": "t"},
            "reward": {"function": "r:f"},
            "algorithm": {"name": "grpo", "groups_per_step": 4, "group_size": 2},
            "eval": {"every": 2},
            "checkpoint": {"every": 2},
            **top,
        }
    )


def make_group(ticket: Ticket, version: int) -> Group:
    rollout = Rollout(
        response=np.array([1, 2], np.int32),
        loss_mask=np.ones(2, bool),
        behaviour_logprobs=np.zeros(2, np.float32),
        policy_versions=np.full(2, version, np.int32),
        reward=1.0,
        finish_reason="stop",
        seconds=0.1,
    )
    prompt = np.asarray(ticket.prompt.tokens, np.int32)
    return Group(uuid.uuid4().bytes, ticket.number, ticket.prompt.prompt_id, prompt, (rollout,) * 2, "g", 0.0)


class StandInGenerator:
    """Turns tickets into groups at its version; may fail, hold one group back for some versions (slow), or deliver it
    when it gets no more tickets (late)."""

    def __init__(
        self,
        name: str,
        world: World,
        *,
        fail_at: int | None = None,
        slow: int | None = None,
        late: int | None = None,
        update_s: float = 0.0,
        scores: bool = True,
    ) -> None:
        self.name = name
        self.world = world
        self.version = 0
        self.fail_at = fail_at
        self.slow = slow
        self.late = late
        self.held: tuple[Ticket, int] | None = None
        self.update_s = update_s
        self.scores = scores

    async def run(self) -> None:
        coordinator = self.world.coordinator
        while (tickets := await coordinator.take_tickets(self.name, num=3, engine_version=self.version)) is not None:
            for ticket in tickets:
                if ticket.number == self.fail_at:
                    raise GenerationError("the engine died")
                if ticket.number in (self.slow, self.late):
                    self.held = (ticket, self.version)
                else:
                    await self.deliver(ticket, self.version)
            if not tickets and self.late is not None and self.held:
                await self.deliver(*self.held)
                self.held = None

    async def deliver(self, ticket: Ticket, version: int) -> None:
        await asyncio.to_thread(self.world.buffer.append, make_group(ticket, version))
        await self.world.coordinator.tickets.group_done(number=ticket.number, failed=None)

    async def update_weights(self, manifest: dict[str, Any]) -> None:
        await asyncio.sleep(self.update_s)
        self.version = manifest["version"]
        if self.held and self.version - self.held[1] > self.world.config.staleness_bound:
            held, self.held = self.held, None
            await self.deliver(*held)

    async def evaluate(self, prompts: Any, *, samples_per_prompt: int, seed: int) -> Any:
        num = len(prompts) * samples_per_prompt
        return {
            "reward": 0.5,
            "length": 2.0,
            "min_version": self.version,
            "max_version": self.version,
            "num_scored": num * self.scores,
            "num_failed": num * (not self.scores),
        }

    async def stats(self) -> dict[str, float]:
        return {"generated_tokens": 1.0, "busy_s": 1.0, "idle_s": 1.0}


class StandInLearners:
    def __init__(self, world: World, *, fail_publish: bool = False) -> None:
        self.world = world
        self.trained: list[tuple[int, list[int]]] = []
        self.saved: list[str] = []
        self.fail_publish = fail_publish

    async def train_step(self, slices: list[list[GroupRef]], *, policy_version: int) -> dict[str, float]:
        refs = [ref for part in slices for ref in part]
        bound = self.world.config.staleness_bound
        assert all(policy_version - ref.min_version <= bound for ref in refs)
        self.trained.append((policy_version, sorted(ref.number for ref in refs)))
        if self.world.stop_at == policy_version:
            self.world.coordinator.stop()
        return {"learner/tokens": 16.0, "learner/reward/mean": 1.0}

    async def publish(self, version: int) -> dict[str, Any]:
        if self.fail_publish:
            raise WeightSyncError("a weight is not finite")
        return {"version": version}

    async def save(self, path: Path) -> None:
        self.saved.append(path.name)


class World:
    """Everything a coordinator needs."""

    def __init__(self, folder: Path, config: RLConfig, *, stop_at: int | None = None) -> None:
        self.config = config
        self.stop_at = stop_at
        self.folder = folder
        (folder / "rollouts").mkdir()

    def run(self, *, generators: list[dict[str, Any]], fail_publish: bool = False) -> None:
        async def main() -> None:
            with ReplayBuffer.local(num_shards=2) as self.buffer:
                self.learners = StandInLearners(self, fail_publish=fail_publish)
                self.progress = Progress(job="test", num_steps=self.config.steps)
                self.coordinator = Coordinator(
                    self.config,
                    prompts=PROMPTS,
                    eval_prompts=PROMPTS[:3],
                    buffer=self.buffer,
                    learners=self.learners,
                    generators=[StandInGenerator(f"g{i}", self, **kw) for i, kw in enumerate(generators)],
                    run_folder=RunFolder(self.folder),
                    metrics=Metrics([JsonlSink(self.folder / "metrics.jsonl")]),
                    progress=self.progress,
                )
                try:
                    await asyncio.wait_for(self.coordinator.run(), timeout=30)
                finally:
                    others = asyncio.all_tasks() - {asyncio.current_task()}
                    assert not others, f"left behind: {others}"

        asyncio.run(main())

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_every_ticket_is_trained_once_and_in_order(tmp_path: Path, mode: str) -> None:
    world = World(tmp_path, make_config(mode=mode))
    world.run(generators=[{}, {}])
    numbers = [number for _, batch in world.learners.trained for number in batch]
    assert sorted(numbers) == list(range(20))
    assert [version for version, _ in world.learners.trained] == [0, 1, 2, 3, 4]
    if mode == "sync":
        assert numbers == list(range(20))
    assert world.learners.saved == ["step_000002", "step_000004", "model"]
    assert world.coordinator.tickets.ledger() == {
        "started": 20,
        "in_flight": 0,
        "stored": 0,
        "trained": 20,
        "failed": 0,
        "evicted": 0,
    }
    evals = [row["step"] for row in world.rows() if "eval/reward/mean" in row]
    assert evals == [0, 2, 4, 5]
    assert world.progress.phase == "done"


def test_a_straggler_past_the_bound_is_evicted_counted_and_replaced(tmp_path: Path) -> None:
    world = World(tmp_path, make_config(max_staleness=1, steps=8))
    world.run(generators=[{"slow": 2}, {"slow": 2}])
    numbers = [number for _, batch in world.learners.trained for number in batch]
    assert len(numbers) == len(set(numbers)) == 32
    assert 2 not in numbers
    ledger = world.coordinator.tickets.ledger()
    assert (ledger["trained"], ledger["evicted"], ledger["started"]) == (32, 1, 33)


def test_stale_wait_trains_strictly_in_order_and_drops_nothing(tmp_path: Path) -> None:
    """Group 2 comes after all others that may be started: every batch waits for its own groups."""
    world = World(tmp_path, make_config(max_staleness=1, steps=6, buffer={"stale": "wait"}))
    world.run(generators=[{"late": 2}])
    assert world.learners.trained == [(v, list(range(4 * v, 4 * v + 4))) for v in range(6)]
    ledger = world.coordinator.tickets.ledger()
    assert (ledger["started"], ledger["trained"], ledger["evicted"]) == (24, 24, 0)
    assert [row["buffer/evicted"] for row in world.rows() if "buffer/evicted" in row] == [0] * 6


def test_stale_pace_takes_what_is_there_instead(tmp_path: Path) -> None:
    world = World(tmp_path, make_config(max_staleness=1, steps=6))
    world.run(generators=[{"late": 2}])
    assert world.learners.trained[0] == (0, [0, 1, 3, 4])


def test_stale_drop_never_waits_and_counts_what_it_drops(tmp_path: Path) -> None:
    """All that the run still needs is started at version 0; from version 2 on it is too old, and made anew."""
    world = World(tmp_path, make_config(max_staleness=1, steps=8, buffer={"stale": "drop"}))
    world.run(generators=[{}])
    numbers = [number for _, batch in world.learners.trained for number in batch]
    assert len(numbers) == len(set(numbers)) == 32
    ledger = world.coordinator.tickets.ledger()
    assert ledger["evicted"] >= 8 and ledger["started"] == 32 + ledger["evicted"] + ledger["stored"]
    rows = [row for row in world.rows() if "buffer/evicted" in row]
    assert [row["buffer/committed"] for row in rows] == [4 * v for v in range(8)]
    assert rows[-1]["buffer/evicted"] >= 8 and rows[-1]["buffer/evicted/length/mean"] == 3.0


def test_stop_ends_after_the_step_in_hand_and_saves_once(tmp_path: Path) -> None:
    world = World(tmp_path, make_config(steps=1000), stop_at=2)
    world.run(generators=[{}])
    assert [version for version, _ in world.learners.trained] == [0, 1, 2]
    assert world.learners.saved[-1] == "model" and world.learners.saved.count("model") == 1
    assert world.progress.phase == "stopped"


def test_a_generator_that_dies_ends_the_run_with_its_error(tmp_path: Path) -> None:
    world = World(tmp_path, make_config())
    with pytest.raises(GenerationError, match="the engine died"):
        world.run(generators=[{"fail_at": 14}, {"fail_at": 14}])
    assert world.learners.saved[-1] == "model"  # what was learned until then is kept


def test_weights_that_cannot_be_published_end_the_run(tmp_path: Path) -> None:
    world = World(tmp_path, make_config())
    with pytest.raises(WeightSyncError, match="not finite"):
        world.run(generators=[{}], fail_publish=True)
    assert "model" not in world.learners.saved


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_an_evaluation_waits_for_engines_that_still_load_its_version(tmp_path: Path, mode: str) -> None:
    world = World(tmp_path, make_config(mode=mode))
    world.run(generators=[{"update_s": 0.05}, {}])
    evals = [row for row in world.rows() if "eval/reward/mean" in row]
    assert [row["step"] for row in evals] == [0, 2, 4, 5]
    assert all(row["eval/version/min"] >= row["step"] for row in evals)


def test_an_evaluation_without_a_single_score_has_no_reward(tmp_path: Path) -> None:
    world = World(tmp_path, make_config())
    world.run(generators=[{"scores": False}])
    evals = [row for row in world.rows() if "eval/num_failed" in row]
    assert evals and all(row["eval/num_scored"] == 0 and "eval/reward/mean" not in row for row in evals)
    assert world.progress.evals == []
