"""The supervised run (SFT): a loop over batches on the learner ranks; no generators, no buffer."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Protocol

from asyncrl.config import SFTConfig
from asyncrl.metrics import Metrics
from asyncrl.progress import Progress
from asyncrl.run_folder import RunFolder
from asyncrl.throughput import Throughput

logger = logging.getLogger(__name__)


class SupervisedLearners(Protocol):
    """All learner ranks as one."""

    async def train_demonstrations(self, step: int) -> dict[str, float]: ...
    async def evaluate(self) -> dict[str, float]: ...
    async def save(self, path: Path) -> None: ...


class SupervisedRun:
    """Trains `config.steps` batches, then saves the model. stop() ends the run early at the next step boundary."""

    def __init__(
        self,
        config: SFTConfig,
        *,
        learners: SupervisedLearners,
        run_folder: RunFolder,
        metrics: Metrics,
        progress: Progress,
    ) -> None:
        self._config = config
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
        self._progress.phase = "training"
        self._progress.training_since = time.time()
        await self._evaluate(0)
        step = 0
        while step < self._config.steps and not self._stopping.is_set():
            metrics = await self._learners.train_demonstrations(step)
            self._throughput.mark("train")
            step += 1
            self._record(step, metrics)
            if step % self._config.eval.every == 0 or step == self._config.steps:
                await self._evaluate(step)
            if self._config.checkpoint.every and step % self._config.checkpoint.every == 0:
                await self._save(self._run_folder.checkpoint(step))
        self._progress.phase = "saving the model"
        await self._save(self._run_folder.model)
        self._progress.phase = "stopped" if self._stopping.is_set() else "done"

    def _record(self, step: int, metrics: dict[str, float]) -> None:
        row = metrics | self._throughput.step((), trained_tokens=metrics["learner/tokens"])
        self._metrics.write(step, row)
        self._progress.record_step(step, row, value=metrics["learner/loss"])

    async def _evaluate(self, step: int) -> None:
        if self._config.data.eval is None:
            return
        row = await self._learners.evaluate()
        self._throughput.mark("evaluate")
        self._metrics.write(step, row)
        self._progress.record_eval(step, row, value=row["eval/token_accuracy"])

    async def _save(self, path: Path) -> None:
        await self._learners.save(path)
        self._progress.saved.append(str(path))
        self._throughput.mark("save")
