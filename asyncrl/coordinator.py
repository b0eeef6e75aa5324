"""The reinforcement-learning run: the policy-version clock between generators, buffer and learners.

    prompts -> [tickets] -> generators --groups--> buffer shards --refs--> coordinator --slices--> learner ranks
                   ^             ^                                              |                      |
                   |             +--------------- manifest of version V+1 ------+<----- publish -------+
                   +-- places freed by trained, failed and evicted groups

Back-pressure: tickets are given only while the groups between ticket and training cannot outlast the staleness bound,
so that generators wait for learners; learners wait for `groups_per_step` stored groups. Trajectories never pass through
here: the coordinator moves references, ranks read the shards themselves. Plain asyncio; Ray is in coordinator_actor.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from asyncrl.actors.generator import EvalResult
from asyncrl.admission import Admission
from asyncrl.buffer import LEDGER, BufferStats, Lease, ReplayBuffer, Sampling, write_parquet
from asyncrl.config import RLConfig
from asyncrl.errors import ReplayBufferError, WeightSyncError
from asyncrl.learners.assign import assign_groups
from asyncrl.metrics import Metrics
from asyncrl.progress import Progress
from asyncrl.prompt_cursor import PromptCursor
from asyncrl.run_folder import RunFolder
from asyncrl.throughput import Throughput
from asyncrl.tickets import TicketOffice
from asyncrl.types import GroupRef, Prompt, Ticket

logger = logging.getLogger(__name__)

NUM_SAMPLE_GROUPS = 2
SAY_WAITING_S = 30.0
SAVE_AFTER_ERROR_TIMEOUT_S = 120.0


class LearnerGroup(Protocol):
    """All learner ranks as one."""

    async def train_step(self, slices: list[list[GroupRef]], *, policy_version: int) -> dict[str, float]: ...
    async def publish(self, version: int) -> dict[str, Any]: ...
    async def save(self, path: Path) -> None: ...


class GeneratorHandle(Protocol):
    """One generator, wherever it runs."""

    name: str

    async def run(self) -> None: ...
    async def update_weights(self, manifest: dict[str, Any]) -> None: ...
    async def evaluate(self, prompts: Sequence[Prompt], *, samples_per_prompt: int, seed: int) -> EvalResult: ...
    async def stats(self) -> dict[str, float]: ...


class Coordinator:
    """Runs `config.steps` batches, then saves the model. stop() ends the run early at the next step boundary."""

    def __init__(
        self,
        config: RLConfig,
        *,
        prompts: Sequence[Prompt],
        eval_prompts: Sequence[Prompt],
        buffer: ReplayBuffer,
        learners: LearnerGroup,
        generators: Sequence[GeneratorHandle],
        run_folder: RunFolder,
        metrics: Metrics,
        progress: Progress,
    ) -> None:
        self._config = config
        self._eval_prompts = eval_prompts
        self._buffer = buffer
        self._learners = learners
        self._generators = list(generators)
        self._run_folder = run_folder
        self._metrics = metrics
        self._progress = progress
        self._stopping = asyncio.Event()
        self._version = 0
        self._supply = BufferStats()
        self._updates: asyncio.Task[None] | None = None
        self._evaluation: asyncio.Task[None] | None = None
        self._throughput = Throughput()
        self.tickets = TicketOffice(
            Admission(
                groups_per_step=config.algorithm.groups_per_step,
                max_staleness=config.staleness_bound,
                num_steps=config.steps,
                paced=config.buffer.stale != "drop",
            ),
            PromptCursor(
                prompts, group_size=config.algorithm.group_size, seed=config.seed, shuffle=config.data.shuffle
            ),
            generators=[g.name for g in generators],
            lock_step=config.mode == "sync",
        )

    async def run(self) -> None:
        """The whole run. Raises the first error of any part; leaves no task behind."""
        await self.tickets.hold()
        generating = [asyncio.create_task(g.run(), name=g.name) for g in self._generators]
        training = asyncio.create_task(self._train(), name="training")
        try:
            await _first_error_or_last(training, generating)
        except Exception as error:
            await _cancel([training])
            await self._save_after(error)
            raise
        finally:
            await self.tickets.close()
            await _cancel([training, *generating, self._updates, self._evaluation])

    def stop(self) -> None:
        """Finish the step that is being trained, save the model and return from run()."""
        self._progress.phase = "stopping: finishing the current step"
        self._stopping.set()

    async def take_tickets(self, generator: str, *, num: int, engine_version: int) -> list[Ticket] | None:
        """See TicketOffice.take."""
        return await self.tickets.take(generator, num=num, engine_version=engine_version)

    async def _train(self) -> None:
        self._progress.training_since = time.time()
        self._progress.phase = "training"
        await self._evaluate()
        await self.tickets.resume()
        while self._version < self._config.steps:
            lease = await self._next_batch()
            if lease is None:
                break
            metrics = self._supply_row() | await self._train_batch(lease)
            await self.tickets.hold()
            await self._advance(lease)
            await self._sync_weights()
            await self._record(metrics)
            if self._version % self._config.eval.every == 0 or self._version == self._config.steps:
                await self._evaluate()
            if self._config.checkpoint.every and self._version % self._config.checkpoint.every == 0:
                await self._save(self._run_folder.checkpoint(self._version))
            await self.tickets.resume()
        await self._finish()

    async def _next_batch(self) -> Lease | None:
        """The lowest-numbered usable groups; None when the run was stopped meanwhile."""
        num_groups = self._config.algorithm.groups_per_step
        settings = self._config.buffer
        while await self._stored_or_stopped(num_groups):
            lease = await asyncio.to_thread(
                self._buffer.lease,
                num_groups,
                policy_version=self._version,
                max_staleness=self._config.staleness_bound,
                sampling=Sampling(settings.sampling, max_uses=settings.max_uses, seed=self._config.seed),
                timeout_s=settings.lease_timeout_s,
            )
            self._supply = await asyncio.to_thread(self._buffer.stats)
            await self.tickets.count_evicted(self._supply.evicted - self.tickets.evicted)
            if lease is not None:
                self._throughput.mark("wait_data")
                return lease
        return None

    async def _stored_or_stopped(self, num_groups: int) -> bool:
        """Wait until that many groups are stored (True), or the run is being stopped (False)."""
        in_order = self._config.buffer.stale == "wait"
        stored = asyncio.create_task(self.tickets.wait_stored(num_groups, in_order=in_order))
        stopping = asyncio.create_task(self._stopping.wait())
        since = time.monotonic()
        try:
            while not (await asyncio.wait([stored, stopping], timeout=SAY_WAITING_S, return_when="FIRST_COMPLETED"))[0]:
                self._progress.phase = f"waiting for trajectories for {time.monotonic() - since:.0f} s"
            if not self._stopping.is_set():
                self._progress.phase = "training"
            return not self._stopping.is_set() and stored.result()
        finally:
            await _cancel([stored, stopping])

    def _supply_row(self) -> dict[str, float]:
        """What generators and buffer held at the moment the batch was leased."""
        capacity = (self._config.staleness_bound + 1) * self._config.algorithm.groups_per_step
        return {
            "buffer/groups": self._supply.groups,
            "buffer/bytes": self._supply.bytes,
            "buffer/held_bytes": self._supply.held_bytes,
            "buffer/fill": (self._supply.groups + self._supply.leased_groups) / capacity,
            **{f"buffer/{name}": getattr(self._supply, name) for name in LEDGER},
            **_selection_bias(self._supply),
            **{f"tickets/{name}": count for name, count in self.tickets.ledger().items()},
        }

    async def _train_batch(self, lease: Lease) -> dict[str, float]:
        if self._version % self._config.eval.every == 0:
            await self._keep_sample(lease)
        slices = assign_groups(
            lease.refs,
            num_ranks=self._config.learners.num_ranks,
            num_minibatches=self._config.algorithm.num_minibatches,
        )
        metrics = await self._learners.train_step(slices, policy_version=self._version)
        self._throughput.mark("train")
        return metrics

    async def _advance(self, lease: Lease) -> None:
        """The optimizer has stepped: the groups are spent and the clock moves."""
        await asyncio.to_thread(self._buffer.commit, lease)
        self._version += 1
        await asyncio.to_thread(self._buffer.advance, self._version)
        stats = await asyncio.to_thread(self._buffer.stats)
        numbers = [ref.number for ref in lease.refs]
        await self.tickets.count_trained(numbers, num_groups=stats.committed - self.tickets.trained)

    async def _sync_weights(self) -> None:
        """Publish this version and let every engine pull it; only sync mode waits until they have it.

        The previous version's pulls end first: an engine is never more than one update behind, and no file is
        recycled under a reader.
        """
        if self._updates is not None:
            await self._updates
        manifest = await self._learners.publish(self._version)
        self._throughput.mark("publish")
        self._updates = asyncio.create_task(self._update_generators(manifest))
        if self._config.mode == "sync":
            await self._updates
            self._throughput.mark("wait_weights")

    async def _update_generators(self, manifest: dict[str, Any]) -> None:
        await asyncio.gather(*(g.update_weights(manifest) for g in self._generators))
        await self.tickets.wake()

    async def _record(self, metrics: dict[str, float]) -> None:
        stats = await asyncio.gather(*(g.stats() for g in self._generators))
        row = metrics | self._throughput.step(stats, trained_tokens=metrics["learner/tokens"])
        self._metrics.write(self._version, row)
        self._progress.record_step(self._version, row, value=metrics["learner/reward/mean"])
        logger.info("version %d: reward %.3f", self._version, metrics["learner/reward/mean"])

    async def _evaluate(self) -> None:
        """Evaluate on the held-out prompts, from this version on; async mode trains, and may update, meanwhile."""
        if not self._eval_prompts:
            return
        if self._evaluation is not None:
            await self._evaluation
        self._evaluation = asyncio.create_task(self._evaluate_version(self._version, self._updates))
        if self._config.mode == "sync" or self._version in (0, self._config.steps):
            await self._evaluation
            self._throughput.mark("evaluate")

    async def _evaluate_version(self, version: int, updates: asyncio.Task[None] | None) -> None:
        if updates is not None:
            await asyncio.shield(updates)  # the engines are at this version, at least
        num = len(self._generators)
        results = await asyncio.gather(
            *(
                generator.evaluate(
                    self._eval_prompts[i::num],
                    samples_per_prompt=self._config.eval.samples_per_prompt,
                    seed=self._config.seed + i,
                )
                for i, generator in enumerate(self._generators)
                if i < len(self._eval_prompts)
            )
        )
        row = _merge_evals(results)
        self._metrics.write(version, row)
        self._progress.record_eval(version, row, value=row.get("eval/reward/mean"))

    async def _keep_sample(self, lease: Lease) -> None:
        groups = await asyncio.to_thread(self._buffer.read, lease.refs[:NUM_SAMPLE_GROUPS])
        await asyncio.to_thread(write_parquet, self._run_folder.rollout_sample(self._version), groups)

    async def _save_after(self, error: Exception) -> None:
        """The run failed: keep what was learned, if the learners still can. Never raises."""
        if not self._version or isinstance(error, WeightSyncError):  # weights that are not finite are not worth it
            return
        logger.error("the run failed, saving the model of version %d or the step in progress: %s", self._version, error)
        self._progress.phase = "failed: saving the model"
        try:
            async with asyncio.timeout(SAVE_AFTER_ERROR_TIMEOUT_S):
                await self._save(self._run_folder.model)
        except Exception as second:  # noqa: BLE001 - whatever it is, the first error is the one to report
            logger.error("the model could not be saved: %s: %s", type(second).__name__, second)

    async def _check_ledger(self) -> None:
        """Every ticket and every stored group must be accounted for.

        Raises:
            ReplayBufferError: something was lost or counted twice: a bug, or damage that the shards' logs tell of.
        """
        stats = await asyncio.to_thread(self._buffer.stats)
        ledger = self.tickets.ledger()
        # A group that is being delivered may be in the buffer and still be in flight here.
        unreported = stats.appended - (ledger["stored"] + ledger["trained"] + ledger["evicted"])
        balanced = ledger["started"] == sum(ledger.values()) - ledger["started"]
        if not (stats.is_balanced and balanced and 0 <= unreported <= ledger["in_flight"]):
            raise ReplayBufferError(f"the ledger of this run does not balance: tickets {ledger}, buffer {stats}")
        logger.info("the ledger balances: %s", ledger)

    async def _save(self, path: Path) -> None:
        await self._learners.save(path)
        self._progress.saved.append(str(path))
        self._throughput.mark("save")

    async def _finish(self) -> None:
        self._progress.phase = "saving the model"
        await self.tickets.close()
        if self._evaluation is not None:
            await self._evaluation
        if self._updates is not None:
            await self._updates
        await self._save(self._run_folder.model)
        await self._check_ledger()
        self._progress.phase = "stopped" if self._stopping.is_set() else "done"


def _selection_bias(supply: BufferStats) -> dict[str, float]:
    """Mean length and reward of what was trained on and of what was dropped: dropping by age may favour some."""
    row: dict[str, float] = {}
    for fate in ("committed", "evicted"):
        num_groups, num_rows = getattr(supply, fate), getattr(supply, f"{fate}_rows")
        if num_groups:
            row[f"buffer/{fate}/length/mean"] = getattr(supply, f"{fate}_tokens") / num_rows
            row[f"buffer/{fate}/reward/mean"] = getattr(supply, f"{fate}_reward") / num_groups
    return row


def _merge_evals(results: Sequence[EvalResult]) -> dict[str, float]:
    """Metrics over all generators' shares of the held-out prompts."""
    num_scored = sum(r["num_scored"] for r in results)

    def mean(name: Literal["reward", "length"]) -> float:
        return sum(r[name] * r["num_scored"] for r in results) / num_scored

    scored = {"eval/reward/mean": mean("reward"), "eval/length/mean": mean("length")} if num_scored else {}
    return scored | {
        "eval/num_scored": num_scored,
        "eval/num_failed": sum(r["num_failed"] for r in results),
        "eval/version/min": min(r["min_version"] for r in results),
        "eval/version/max": max(r["max_version"] for r in results),
    }


async def _first_error_or_last(training: asyncio.Task[None], generating: Sequence[asyncio.Task[None]]) -> None:
    """Wait for the training; a generator that fails, or leaves before it, ends the wait at once."""
    pending: set[asyncio.Task[None]] = {training, *generating}
    while not training.done():
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(done, key=lambda task: task is training):  # what a generator's end does to it is no cause
            task.result()


async def _cancel(tasks: Sequence[asyncio.Task[Any] | None]) -> None:
    live = [t for t in tasks if t is not None and not t.done()]
    for task in live:
        task.cancel()
    await asyncio.gather(*live, return_exceptions=True)
