"""Policy training on replayed groups, one rank's part of it.

    groups -> advantages -> rows -> minibatches -> packed microbatches
           -> logprobs -> loss -> backward (gradients meet on the last microbatch) -> clip, check, step

Every method is collective: all ranks call it at the same time, and an error on one is raised on all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms import diagnostics
from asyncrl.algorithms.advantages import ADVANTAGES
from asyncrl.algorithms.diagnostics import Diagnostics, diagnose
from asyncrl.algorithms.objective import Objective, StepCounts
from asyncrl.config import RLConfig
from asyncrl.errors import AsyncRLError, ReplayBufferError
from asyncrl.learners import export, rollouts
from asyncrl.learners.distributed import data_mesh, gather_numbers, leave_distributed
from asyncrl.learners.logprobs import TokenScores
from asyncrl.learners.models import compute_dtype, load_policy
from asyncrl.learners.optim import Optimizer
from asyncrl.learners.packing import Microbatch, dummy, pack
from asyncrl.learners.rollouts import TrainRow
from asyncrl.learners.sharding import scoring, sync_gradients
from asyncrl.types import Group
from asyncrl.weights import WeightPublisher


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """A packed microbatch with its per-token columns [t] on the device."""

    packed: Microbatch
    behaviour: Tensor
    advantages: Tensor
    fresh: Tensor
    row_lengths: Tensor

    @classmethod
    def from_rows(cls, packed: Microbatch, rows: Sequence[TrainRow], device: torch.device) -> PolicyBatch:
        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(packed.gather([getattr(row, name) for row in rows])).to(device, dtype)

        return cls(
            packed=packed,
            behaviour=column("behaviour_logprobs", torch.float32),
            advantages=column("advantages", torch.float32),
            fresh=column("fresh", torch.bool),
            row_lengths=torch.from_numpy(packed.row_lengths).to(device),
        )


class PolicyTrainer:
    """One rank of the policy learner.

    Args:
        config: the run. config.steps is the length of the learning-rate schedule.
        device: from init_distributed, called before.
        publisher: where new weights go (rank 0); None elsewhere. close() closes it.
    """

    def __init__(
        self,
        config: RLConfig,
        *,
        world_size: int,
        device: torch.device,
        publisher: WeightPublisher | None,
    ) -> None:
        self.config = config
        self.device = device
        self.groups_per_rank = config.algorithm.groups_per_step // world_size
        self.dtype = compute_dtype(config.model, device)
        self.model = load_policy(
            config.model,
            mesh=data_mesh(device),
            device=device,
            temperature=config.generators.temperature,
            activation_checkpointing=config.learners.activation_checkpointing,
        )
        self.optimizer = Optimizer(self.model, config=config.learners, total_steps=config.steps)
        self.objective = Objective.from_config(config.algorithm)
        self.publisher = publisher

    def publish(self, version: int) -> dict | None:
        """Publish the current weights; the manifest on rank 0, None elsewhere."""
        manifest = export.publish(self.model, self.publisher, version=version, dtype=self.dtype)
        return manifest.to_dict() if manifest is not None else None

    def save(self, path: str | Path) -> None:
        """Write the current weights as a Hugging Face folder."""
        model = self.config.model
        export.save(self.model, path, source=model.path, trust_remote_code=model.trust_remote_code)

    def close(self) -> None:
        """Remove what was published and leave the process group."""
        if self.publisher is not None:
            self.publisher.close()
        leave_distributed()

    def train_step(self, groups: list[Group], *, policy_version: int) -> dict[str, float]:
        """Train on one batch: num_minibatches optimizer steps from policy_version to the next version.

        Args:
            groups: this rank's whole groups in the order of assign_groups.

        Returns:
            Metrics of the whole batch over all ranks, the same on each.

        Raises:
            ReplayBufferError: a group of any rank is staler than the bound.
            AsyncRLError: a rank got a wrong number of groups, or the numbers of the step are not finite.
        """
        self._check(groups, policy_version)
        minibatches = [self._pack(part, policy_version) for part in self._minibatches(groups)]
        anchors = self._anchors([batches for batches, _ in minibatches])
        step = policy_version - self.config.first_version
        totals: Diagnostics | None = None
        metrics: list[dict[str, float]] = []
        for i, (batches, counts) in enumerate(minibatches):
            loss, part = self._backward(batches, counts, anchors[i], first=i == 0)
            totals = part if totals is None else totals.add(part)
            loss_sum = float(gather_numbers(loss[None], device=self.device).sum())
            metrics.append({"loss": loss_sum, **self.optimizer.step(step=step, loss=loss_sum)})
        assert totals is not None
        averaged = {key: float(np.mean([m[key] for m in metrics])) for key in metrics[0]}
        counted = {
            "tokens": sum(counts.tokens for _, counts in minibatches),
            "sequences": sum(counts.sequences for _, counts in minibatches),
        }
        return _named({**averaged, **counted, **self._reduce(groups, totals, policy_version)})

    def _check(self, groups: Sequence[Group], policy_version: int) -> None:
        staleness = rollouts.max_staleness(groups, policy_version=policy_version)
        table = gather_numbers([staleness, len(groups)], device=self.device)
        bound = self.config.staleness_bound
        if table[:, 0].max() > bound:
            raise ReplayBufferError(
                f"a group is {int(table[:, 0].max())} versions behind policy version {policy_version}, past "
                f"max_staleness = {bound}; it was leased for another version or should have been evicted"
            )
        if (table[:, 1] != self.groups_per_rank).any():
            raise AsyncRLError(
                f"each learner rank needs {self.groups_per_rank} groups per step; "
                f"the ranks got {table[:, 1].astype(int).tolist()}"
            )

    def _minibatches(self, groups: list[Group]) -> list[list[Group]]:
        size = len(groups) // self.config.algorithm.num_minibatches
        return [groups[start : start + size] for start in range(0, len(groups), size)]

    def _pack(self, groups: Sequence[Group], policy_version: int) -> tuple[list[PolicyBatch], StepCounts]:
        """This rank's microbatches of one optimizer step, at least one and as many as any rank has; global counts."""
        advantage = ADVANTAGES[self.config.algorithm.name]
        rows = rollouts.rows_of(groups, advantage=advantage, policy_version=policy_version)
        packed = pack([row.row for row in rows], max_tokens=self.config.learners.max_tokens_per_microbatch)
        tokens = sum(row.advantages.size for row in rows)
        table = gather_numbers([tokens, len(rows), len(packed)], device=self.device)
        packed += [dummy()] * (max(1, int(table[:, 2].max())) - len(packed))
        counts = StepCounts(tokens=int(table[:, 0].sum()), sequences=int(table[:, 1].sum()))
        return [PolicyBatch.from_rows(micro, rows, self.device) for micro in packed], counts

    def _anchors(self, minibatches: list[list[PolicyBatch]]) -> list[list[Tensor | None]]:
        """Logprobs at the start of the batch, by minibatch and microbatch. None: those of the step's own forward.

        The forward is needed only when weights change before a minibatch is used.
        """
        if len(minibatches) == 1 or self.config.algorithm.anchor != "recompute":
            return [[None] * len(batches) for batches in minibatches]
        with scoring(self.model):
            return [[self.model(batch.packed).logprobs for batch in batches] for batches in minibatches]

    def _backward(
        self, batches: list[PolicyBatch], counts: StepCounts, anchors: list[Tensor | None], *, first: bool
    ) -> tuple[Tensor, Diagnostics]:
        """Gradients of one optimizer step. Returns this rank's share of the loss (detached) and of the diagnostics."""
        losses: list[Tensor] = []
        parts: list[Diagnostics] = []
        for i, (batch, anchor) in enumerate(zip(batches, anchors, strict=True)):
            sync_gradients(self.model, i == len(batches) - 1)
            scores: TokenScores = self.model(batch.packed)
            start = scores.logprobs.detach() if anchor is None else anchor
            result = self.objective.loss(
                scores.logprobs,
                recomputed=start,
                behaviour=batch.behaviour,
                advantages=batch.advantages,
                row_lengths=batch.row_lengths,
                counts=counts,
            )
            result.loss.backward()
            losses.append(result.loss.detach().double())
            # Without an anchor forward, the start of the batch is known in the first minibatch only.
            known = batch.fresh if first or anchor is not None else torch.zeros_like(batch.fresh)
            parts.append(
                diagnose(
                    result,
                    logprobs=scores.logprobs,
                    behaviour=batch.behaviour,
                    entropy=scores.entropy,
                    start=start,
                    fresh=known,
                )
            )
        total = parts[0]
        for part in parts[1:]:
            total = total.add(part)
        return torch.stack(losses).sum(), total

    def _reduce(self, groups: Sequence[Group], totals: Diagnostics, policy_version: int) -> dict[str, float]:
        sums = rollouts.rollout_sums(groups, policy_version=policy_version)
        staleness = rollouts.max_staleness(groups, policy_version=policy_version)
        numbers = torch.cat([totals.sums, totals.maxima, totals.sums.new_tensor([*sums, staleness])])
        table = gather_numbers(numbers, device=self.device)
        num_sums, num_maxima = len(diagnostics.SUMS), len(diagnostics.MAXIMA)
        added, largest = table.sum(0), table.max(0)
        return {
            **diagnostics.summarise(added[:num_sums].tolist(), largest[num_sums : num_sums + num_maxima].tolist()),
            **rollouts.summarise(added[num_sums + num_maxima : -1].tolist()),
            "staleness/max": float(largest[-1]),
        }


def _named(metrics: dict[str, float]) -> dict[str, float]:
    return {f"learner/{key}": float(value) for key, value in metrics.items()}
