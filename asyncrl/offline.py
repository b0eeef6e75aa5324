"""The offline run: policy training on stored groups, without generators.

    files of stored groups --append--> buffer shards --refs--> OfflineRun --slices--> learner ranks
                                           ^                                              |
                                           +----------------- lease, commit --------------+

All groups are in the buffer before the first step, so that a run repeats: what a lease takes depends on the contents,
the seed and the order of sampling alone. The policy version counts on from the newest that sampled a stored group.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from asyncrl.buffer import LEDGER, Lease, ReplayBuffer, Sampling
from asyncrl.buffer.stored import StoredGroup
from asyncrl.config import OfflineConfig
from asyncrl.errors import ReplayBufferError
from asyncrl.learners.assign import assign_groups
from asyncrl.metrics import Metrics
from asyncrl.progress import Progress
from asyncrl.run_folder import RunFolder
from asyncrl.throughput import Throughput
from asyncrl.types import GroupRef

logger = logging.getLogger(__name__)

LOAD_BATCH = 64


class PolicyLearners(Protocol):
    """All learner ranks as one."""

    async def train_step(self, slices: list[list[GroupRef]], *, policy_version: int) -> dict[str, float]: ...
    async def save(self, path: Path) -> None: ...


class OfflineRun:
    """Trains `config.steps` batches, or as many as the groups make, then saves the model. stop() ends the run early at
    the next step boundary."""

    def __init__(
        self,
        config: OfflineConfig,
        *,
        groups: Sequence[StoredGroup],
        buffer: ReplayBuffer,
        learners: PolicyLearners,
        run_folder: RunFolder,
        metrics: Metrics,
        progress: Progress,
    ) -> None:
        self._config = config
        self._groups = groups
        self._buffer = buffer
        self._learners = learners
        self._run_folder = run_folder
        self._metrics = metrics
        self._progress = progress
        self._stopping = asyncio.Event()
        self._throughput = Throughput()

    def stop(self) -> None:
        """Finish the step that is being trained, save the model and return from run()."""
        self._progress.phase = "stopping: finishing the current step"
        self._stopping.set()

    async def run(self) -> None:
        """Raises ReplayBufferError when a group changed since it was checked, or the buffer has no room for all."""
        await self._load()
        self._progress.phase = "training"
        self._progress.training_since = time.time()
        step = 0
        while step < self._config.steps and not self._stopping.is_set():
            lease = await self._next_batch(step)
            if lease is None:
                break
            metrics = await self._supply_row() | await self._train(lease, step)
            await asyncio.to_thread(self._buffer.commit, lease)
            step += 1
            self._record(step, metrics)
            if self._config.checkpoint.every and step % self._config.checkpoint.every == 0:
                await self._save(self._run_folder.checkpoint(step))
        self._progress.phase = "saving the model"
        await self._save(self._run_folder.model)
        await self._check_ledger()
        self._progress.phase = self._ending(step)

    async def _load(self) -> None:
        for start in range(0, len(self._groups), LOAD_BATCH):
            self._progress.phase = f"loading {len(self._groups)} groups"
            batch = self._groups[start : start + LOAD_BATCH]
            await asyncio.to_thread(lambda batch=batch: self._buffer.append_encoded([group.read() for group in batch]))
        self._throughput.mark("load")

    async def _next_batch(self, step: int) -> Lease | None:
        """None: the groups are used up."""
        settings = self._config.buffer
        lease = await asyncio.to_thread(
            self._buffer.lease,
            self._config.algorithm.groups_per_step,
            policy_version=self._config.first_version + step,
            max_staleness=self._config.staleness_bound,
            sampling=Sampling(settings.sampling, max_uses=settings.max_uses, seed=self._config.seed),
            timeout_s=settings.lease_timeout_s,
        )
        self._throughput.mark("wait_data")
        return lease

    async def _supply_row(self) -> dict[str, float]:
        """The buffer at the moment the batch was leased. Its fill is the share of the groups that is left."""
        stats = await asyncio.to_thread(self._buffer.stats)
        return {
            "buffer/groups": stats.groups,
            "buffer/bytes": stats.bytes,
            "buffer/held_bytes": stats.held_bytes,
            "buffer/fill": (stats.groups + stats.leased_groups) / len(self._groups),
            **{f"buffer/{name}": getattr(stats, name) for name in LEDGER},
        }

    async def _train(self, lease: Lease, step: int) -> dict[str, float]:
        slices = assign_groups(
            lease.refs,
            num_ranks=self._config.learners.num_ranks,
            num_minibatches=self._config.algorithm.num_minibatches,
        )
        metrics = await self._learners.train_step(slices, policy_version=self._config.first_version + step)
        self._throughput.mark("train")
        return metrics

    def _record(self, step: int, metrics: dict[str, float]) -> None:
        row = metrics | self._throughput.step((), trained_tokens=metrics["learner/tokens"])
        self._metrics.write(step, row)
        self._progress.record_step(step, row, value=metrics["learner/reward/mean"])
        logger.info("step %d: loss %.4f", step, metrics["learner/loss"])

    async def _save(self, path: Path) -> None:
        await self._learners.save(path)
        self._progress.saved.append(str(path))
        self._throughput.mark("save")

    async def _check_ledger(self) -> None:
        stats = await asyncio.to_thread(self._buffer.stats)
        if not stats.is_balanced or stats.appended != len(self._groups) or stats.evicted:
            raise ReplayBufferError(
                f"the ledger of this run does not balance: {len(self._groups)} groups loaded, buffer {stats}"
            )

    def _ending(self, step: int) -> str:
        if self._stopping.is_set():
            return "stopped"
        if step < self._config.steps:
            return f"done: the stored groups were used up after {step} of {self._config.steps} steps"
        return "done"
