from __future__ import annotations

import math

import pytest
import torch
from learner_cases import process_group
from torch import nn

from asyncrl.config import LearnersConfig
from asyncrl.errors import AsyncRLError
from asyncrl.learners.optim import Optimizer, clip_gradients, local_gradients, lr_at


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", {0: 0.25, 3: 1.0, 4: 1.0, 24: 1.0, 43: 1.0}),
        ("linear", {0: 0.25, 3: 1.0, 4: 1.0, 24: 0.55, 44: 0.1}),
        ("cosine", {1: 0.5, 3: 1.0, 4: 1.0, 14: 0.1 + 0.45 * (1 + math.cos(math.pi / 4)), 24: 0.55, 44: 0.1}),
    ],
)
def test_schedule(schedule: str, expected: dict[int, float]) -> None:
    config = LearnersConfig.model_validate({"lr": 2.0, "warmup_steps": 4, "lr_schedule": schedule, "min_lr_ratio": 0.1})
    for step, factor in expected.items():
        assert lr_at(step, config=config, total_steps=44) == pytest.approx(2.0 * factor), step


def test_the_first_step_trains_without_warm_up() -> None:
    assert lr_at(0, config=LearnersConfig(lr=0.5, lr_schedule="linear"), total_steps=1) == 0.5


def test_clipping_scales_to_the_norm_and_leaves_small_gradients() -> None:
    with process_group():
        grads = [torch.full((3,), 2.0), torch.full((4,), 1.0)]
        assert clip_gradients(grads, max_norm=1.0).item() == pytest.approx(4.0)
        assert torch.nn.utils.get_total_norm(grads).item() == pytest.approx(1.0, abs=1e-5)
        assert clip_gradients(grads, max_norm=5.0).item() == pytest.approx(1.0, abs=1e-5)
        assert grads[1].tolist() == pytest.approx([0.25] * 4)


def test_adamw_step_equals_torch() -> None:
    with process_group():
        model, twin = nn.Linear(4, 3), nn.Linear(4, 3)
        twin.load_state_dict(model.state_dict())
        config = LearnersConfig(lr=0.1, weight_decay=0.2, grad_clip=1e9)
        optimizer = Optimizer(model, config=config, total_steps=5)
        reference = torch.optim.AdamW(
            [{"params": [twin.weight], "weight_decay": 0.2}, {"params": [twin.bias], "weight_decay": 0.0}],
            lr=0.1,
            betas=(0.9, 0.95),
        )
        for step in range(3):
            for net in (model, twin):
                net(torch.ones(2, 4)).square().sum().backward()
            optimizer.step(step=step, loss=1.0)
            reference.step()
            reference.zero_grad()
        torch.testing.assert_close(model.weight, twin.weight)
        torch.testing.assert_close(model.bias, twin.bias)


@pytest.mark.parametrize(("loss", "gradient"), [(float("nan"), 1.0), (1.0, float("inf")), (1.0, float("nan"))])
def test_numbers_that_are_not_finite_raise_before_any_weight_changes(loss: float, gradient: float) -> None:
    with process_group():
        model = nn.Linear(4, 3)
        before = model.weight.clone()
        optimizer = Optimizer(model, config=LearnersConfig(), total_steps=5)
        model(torch.ones(2, 4)).sum().backward()
        local_gradients(model.parameters())[0][0, 0] *= gradient
        with pytest.raises(AsyncRLError, match="must be finite"):
            optimizer.step(step=0, loss=loss)
        assert torch.equal(model.weight, before)
        assert model.weight.grad is None
