"""Supervised fine-tuning on demonstrations, one rank's part of it.

The loss of a step is the mean over all trained (response) tokens of its batch, whatever the ranks and microbatches.
Every rank draws the same seeded order and takes its own share of each batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from asyncrl.config import SFTConfig
from asyncrl.data import Demonstration, load_demonstrations, load_tokenizer
from asyncrl.errors import DataError
from asyncrl.learners import export
from asyncrl.learners.assign import balanced_split
from asyncrl.learners.distributed import data_mesh, gather_numbers, leave_distributed
from asyncrl.learners.models import load_policy
from asyncrl.learners.optim import Optimizer
from asyncrl.learners.packing import Microbatch, Row, dummy, pack
from asyncrl.learners.sharding import scoring, sync_gradients


class SFTTrainer:
    """One rank of supervised fine-tuning. Every method is collective.

    Args:
        config: the run; batch_size demonstrations make one optimizer step over all ranks.
        device: from init_distributed, called before.
    """

    def __init__(self, config: SFTConfig, *, rank: int, world_size: int, device: torch.device) -> None:
        self.config = config
        self.rank, self.world_size, self.device = rank, world_size, device
        tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
        self.train_rows = _rows(load_demonstrations(config.data.train, config=config.data, tokenizer=tokenizer))
        self.eval_rows: list[Row] = []
        if config.data.eval is not None:
            self.eval_rows = _rows(load_demonstrations(config.data.eval, config=config.data, tokenizer=tokenizer))
        self.model = load_policy(
            config.model,
            mesh=data_mesh(device),
            device=device,
            activation_checkpointing=config.learners.activation_checkpointing,
        )
        self.optimizer = Optimizer(self.model, config=config.learners, total_steps=config.steps)

    def train_step(self, step: int) -> dict[str, float]:
        """One optimizer step on batch number `step` of the seeded order. Metrics are the same on all ranks."""
        size = self.config.batch_size
        positions = range(step * size, (step + 1) * size)
        batch = [self.train_rows[i] for i in draw(positions, num_rows=len(self.train_rows), seed=self.config.seed)]
        shares = balanced_split([row.num_inputs for row in batch], num_parts=self.world_size)
        microbatches, num_tokens = self._pack([batch[i] for i in shares[self.rank]])
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, micro in enumerate(microbatches):
            sync_gradients(self.model, i == len(microbatches) - 1)
            loss = -self.model(micro).logprobs.sum() / num_tokens
            loss.backward()
            total += loss.detach()
        loss_sum = float(gather_numbers(total[None], device=self.device).sum())
        metrics = {"loss": loss_sum, **self.optimizer.step(step=step, loss=loss_sum), "tokens": num_tokens}
        return {f"learner/{key}": float(value) for key, value in metrics.items()}

    def evaluate(self) -> dict[str, float]:
        """Mean loss and greedy accuracy over the held-out response tokens; empty without [data] eval."""
        if not self.eval_rows:
            return {}
        microbatches, num_tokens = self._pack(self.eval_rows[self.rank :: self.world_size])
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        with scoring(self.model):
            for micro in microbatches:
                scores = self.model(micro)
                totals += torch.stack([-scores.logprobs.double().sum(), scores.greedy.double().sum()])
        loss, correct = gather_numbers(totals, device=self.device).sum(0) / num_tokens
        return {"eval/loss": float(loss), "eval/token_accuracy": float(correct), "eval/tokens": float(num_tokens)}

    def save(self, path: str | Path) -> None:
        """Write the current weights as a Hugging Face folder."""
        model = self.config.model
        export.save(self.model, path, source=model.path, trust_remote_code=model.trust_remote_code)

    def close(self) -> None:
        """Leave the process group."""
        leave_distributed()

    def _pack(self, rows: Sequence[Row]) -> tuple[list[Microbatch], int]:
        """This rank's microbatches, as many as any rank has, and the trained tokens of all ranks."""
        packed = pack(rows, max_tokens=self.config.learners.max_tokens_per_microbatch)
        table = gather_numbers([sum(row.trained.size for row in rows), len(packed)], device=self.device)
        packed += [dummy()] * (int(table[:, 1].max()) - len(packed))
        return packed, int(table[:, 0].sum())


def draw(positions: Sequence[int], *, num_rows: int, seed: int) -> list[int]:
    """Rows at these positions of an endless sequence of epochs, each a new seeded permutation of all rows."""
    epochs = {position // num_rows for position in positions}
    orders = {epoch: np.random.default_rng([seed, epoch]).permutation(num_rows) for epoch in epochs}
    return [int(orders[position // num_rows][position % num_rows]) for position in positions]


def _rows(demonstrations: Sequence[Demonstration]) -> list[Row]:
    rows = []
    for demonstration in demonstrations:
        tokens = np.asarray(demonstration.tokens, np.int32)
        trained = np.arange(max(demonstration.prompt_length, 1), tokens.size)
        if not trained.size:
            raise DataError(f"{demonstration.row_id}: nothing to train on after the prompt")
        rows.append(Row(tokens=tokens, trained=trained))
    return rows
