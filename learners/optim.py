"""AdamW over sharded float32 masters, its schedule, and the step that refuses numbers that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from asyncrl.config import LearnersConfig
from asyncrl.errors import AsyncRLError


def lr_at(step: int, *, config: LearnersConfig, total_steps: int) -> float:
    """Learning rate of step 0 <= step < total_steps.

    Linear warm-up reaches the peak at step warmup_steps - 1; the decay would reach min_lr_ratio at total_steps.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    shape = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.lr_schedule]
    floor = config.min_lr_ratio if config.lr_schedule != "constant" else 0.0
    return config.lr * (floor + (1.0 - floor) * shape)


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """This rank's shards of the gradients, as plain tensors that share memory with them."""
    grads = (p.grad for p in parameters if p.grad is not None)
    return [g.to_local() if isinstance(g, DTensor) else g for g in grads]


def clip_gradients(grads: list[torch.Tensor], *, max_norm: float) -> torch.Tensor:
    """Scale sharded gradients to a global norm of at most max_norm. Returns the norm before, the same on all ranks."""
    squared = torch.nn.utils.get_total_norm(grads).double().square()
    dist.all_reduce(squared)
    norm = squared.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).to(grads[0].dtype)
    for grad in grads:
        grad.mul_(factor)
    return norm


class Optimizer:
    """Clip, check, step. One instance per rank; every method is collective."""

    def __init__(self, model: nn.Module, *, config: LearnersConfig, total_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in self.parameters if p.ndim > 1]
        vectors = [p for p in self.parameters if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        # fused: the other implementations are several times slower on CPU too.
        self.adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=config.betas, fused=True)

    def step(self, *, step: int, loss: float) -> dict[str, float]:
        """One update with the learning rate of `step`. Gradients are consumed.

        Args:
            loss: of the whole optimizer step, the same number on all ranks.

        Raises:
            AsyncRLError: the loss or the gradient norm is not finite; on all ranks, and no weight has changed.
        """
        norm = clip_gradients(local_gradients(self.parameters), max_norm=self.config.grad_clip).item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.adamw.zero_grad()
            raise AsyncRLError(
                f"step {step}: loss {loss} and gradient norm {norm} must be finite; the weights were not changed. "
                "Look at the rewards and behaviour_logprobs of this batch, or lower [learners] lr"
            )
        lr = lr_at(step, config=self.config, total_steps=self.total_steps)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad()
        return {"grad_norm": norm, "lr": lr}
