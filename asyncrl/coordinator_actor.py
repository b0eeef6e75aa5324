"""Ray shell of the coordinator, and the other members as the coordinator sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from asyncrl.actors.generator import EvalResult
from asyncrl.buffer.stored import StoredGroup
from asyncrl.config import JobConfig, OfflineConfig, RLConfig, SFTConfig
from asyncrl.coordinator import Coordinator
from asyncrl.errors import AsyncRLError
from asyncrl.metrics import JsonlSink, Metrics, TensorBoardSink
from asyncrl.offline import OfflineRun
from asyncrl.process import log_to_file
from asyncrl.progress import Progress
from asyncrl.run_folder import RunFolder
from asyncrl.supervised import SupervisedRun
from asyncrl.types import GroupRef, Prompt, Ticket
from asyncrl.wiring import Wiring

OTHER_ERRORS_S = 3.0
"""How long after the first error of a rank the others may still tell the cause."""


class RemoteLearners:
    """All ranks as one; a call goes to every rank at the same time, rank 0 answers."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        self._ranks = list(ranks)

    async def train_step(self, slices: list[list[GroupRef]], *, policy_version: int) -> dict[str, float]:
        return await _first_answer(
            rank.train_groups.remote(refs, policy_version=policy_version)
            for rank, refs in zip(self._ranks, slices, strict=True)
        )

    async def train_demonstrations(self, step: int) -> dict[str, float]:
        return await self._all("train_demonstrations", step)

    async def evaluate(self) -> dict[str, float]:
        return await self._all("evaluate")

    async def publish(self, version: int) -> dict[str, Any]:
        return await self._all("publish", version)

    async def save(self, path: Path) -> None:
        await self._all("save", path)

    async def _all(self, method: str, *args: Any) -> Any:
        return await _first_answer(getattr(rank, method).remote(*args) for rank in self._ranks)


async def _first_answer(calls: Iterable[Any]) -> Any:
    """What rank 0 answers, when all have.

    A rank that fails takes the others' collectives with it, and their complaints may come first: the death of a
    process, or else an error of ours, is the cause to raise.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    if pending:
        await asyncio.wait(pending, timeout=OTHER_ERRORS_S)
    errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
    for kind in (RayActorError, AsyncRLError, Exception):
        for error in errors:
            if isinstance(error, kind):
                raise error
    return tasks[0].result()


class RemoteGenerator:
    """One generator actor."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self._handle = handle

    async def run(self) -> None:
        await self._handle.run.remote()

    async def update_weights(self, manifest: dict[str, Any]) -> None:
        await self._handle.update_weights.remote(manifest)

    async def evaluate(self, prompts: Sequence[Prompt], *, samples_per_prompt: int, seed: int) -> EvalResult:
        return await self._handle.evaluate.remote(prompts, samples_per_prompt=samples_per_prompt, seed=seed)

    async def stats(self) -> dict[str, float]:
        return await self._handle.stats.remote()


@ray.remote
class CoordinatorActor:
    """Holds the run of either family; connect_*() once, then run()."""

    def __init__(self, config: JobConfig, *, run_folder: RunFolder) -> None:
        log_to_file(run_folder.log("coordinator"))
        self._config = config
        self._run_folder = run_folder
        self._progress = Progress(job=config.name, num_steps=config.steps)
        self._metrics = Metrics([JsonlSink(run_folder.metrics), TensorBoardSink(run_folder.tensorboard)])
        self._job: Coordinator | OfflineRun | SupervisedRun | None = None

    async def connect_rl(
        self,
        *,
        prompts: Sequence[Prompt],
        eval_prompts: Sequence[Prompt],
        wiring: Wiring,
        learners: Sequence[Any],
        generators: Mapping[str, Any],
    ) -> None:
        assert isinstance(self._config, RLConfig)
        self._job = self._coordinator = Coordinator(
            self._config,
            prompts=prompts,
            eval_prompts=eval_prompts,
            buffer=wiring.connect_buffer(),
            learners=RemoteLearners(learners),
            generators=[RemoteGenerator(name, handle) for name, handle in generators.items()],
            run_folder=self._run_folder,
            metrics=self._metrics,
            progress=self._progress,
        )

    async def connect_offline(self, *, groups: Sequence[StoredGroup], wiring: Wiring, learners: Sequence[Any]) -> None:
        assert isinstance(self._config, OfflineConfig)
        self._job = OfflineRun(
            self._config,
            groups=groups,
            buffer=wiring.connect_buffer(),
            learners=RemoteLearners(learners),
            run_folder=self._run_folder,
            metrics=self._metrics,
            progress=self._progress,
        )

    async def connect_supervised(self, *, learners: Sequence[Any]) -> None:
        assert isinstance(self._config, SFTConfig)
        self._job = SupervisedRun(
            self._config,
            learners=RemoteLearners(learners),
            run_folder=self._run_folder,
            metrics=self._metrics,
            progress=self._progress,
        )

    async def run(self) -> None:
        assert self._job is not None
        try:
            await self._job.run()
        finally:
            self._metrics.close()

    async def stop(self) -> None:
        if self._job is not None:
            self._job.stop()

    async def progress(self) -> Progress:
        return self._progress

    async def take_tickets(self, generator: str, *, num: int, engine_version: int) -> list[Ticket] | None:
        return await self._coordinator.take_tickets(generator, num=num, engine_version=engine_version)

    async def group_done(self, generator: str, **report: Any) -> None:
        await self._coordinator.tickets.group_done(**report)
