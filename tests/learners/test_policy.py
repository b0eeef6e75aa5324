"""PolicyTrainer in one process. Several ranks: test_ranks.py."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_cases import make_groups, process_group, rl_config

from asyncrl.config import RLConfig
from asyncrl.errors import AsyncRLError, ReplayBufferError
from asyncrl.learners import PolicyTrainer
from asyncrl.types import Group
from asyncrl.weights import WeightPublisher


@pytest.fixture
def device() -> Iterator[torch.device]:
    with process_group() as joined:
        yield joined


def trainer(config: RLConfig, device: torch.device, tmp_path: Path) -> PolicyTrainer:
    return PolicyTrainer(config, world_size=1, device=device, publisher=WeightPublisher(tmp_path / "weights"))


def weights(made: PolicyTrainer) -> torch.Tensor:
    return torch.cat([p.full_tensor().detach().flatten() for p in made.model.parameters()])


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_microbatch_budget_does_not_change_the_step(
    aggregate: str, minibatches: int, tiny_model: Path, device: torch.device, tmp_path: Path
) -> None:
    results = []
    for budget in (10_000, 25):
        config = rl_config(
            tiny_model,
            aggregate=aggregate,
            num_minibatches=minibatches,
            learners={"max_tokens_per_microbatch": budget},
        )
        made = trainer(config, device, tmp_path / str(budget))
        metrics = made.train_step(make_groups(4), policy_version=1)
        results.append((metrics, weights(made)))
        made.publisher.close()
    (metrics, after), (split_metrics, split_after) = results
    assert metrics == pytest.approx(split_metrics, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(after, split_after, rtol=1e-5, atol=1e-5)


def test_loss_of_a_step_by_hand(tiny_model: Path, device: torch.device, tmp_path: Path) -> None:
    """With one minibatch the ratio is 1, so the loss is -sum(w A) / tokens, w from the logprobs at the start."""
    config = rl_config(tiny_model, weight="none")
    groups = make_groups(4)
    metrics = trainer(config, device, tmp_path).train_step(groups, policy_version=1)
    total, tokens = 0.0, 0
    for group in groups:
        scored = [r for r in group.rollouts if math.isfinite(r.reward)]
        rewards = np.array([r.reward for r in scored])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        counts = np.array([r.loss_mask.sum() for r in scored])
        total -= float((advantages * counts).sum())
        tokens += int(counts.sum())
    assert metrics["learner/loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert metrics["learner/tokens"] == tokens
    assert metrics["learner/rollouts/failed"] == 1
    assert metrics["learner/sequences"] == 11
    assert metrics["learner/ratio/max"] == 1.0
    assert metrics["learner/staleness/max"] == 1


def test_the_step_raises_the_probability_of_the_better_rollouts(
    tiny_model: Path, device: torch.device, tmp_path: Path
) -> None:
    made = trainer(rl_config(tiny_model), device, tmp_path)
    groups = make_groups(4)
    first = made.train_step(groups, policy_version=1)
    later = [made.train_step(groups, policy_version=2) for _ in range(5)][-1]
    # E[w A] over the same rollouts: w = pi/mu grows where A > 0, so the loss -mean(w A) falls.
    assert later["learner/loss"] < first["learner/loss"] - 0.01


def test_later_minibatches_move_away_from_the_anchor(tiny_model: Path, device: torch.device, tmp_path: Path) -> None:
    made = trainer(rl_config(tiny_model, num_minibatches=4), device, tmp_path)
    metrics = made.train_step(make_groups(4), policy_version=1)
    assert metrics["learner/ratio/max"] > 1.001


def test_behaviour_anchor_takes_the_recorded_logprobs(tiny_model: Path, device: torch.device, tmp_path: Path) -> None:
    made = trainer(rl_config(tiny_model, anchor="behaviour"), device, tmp_path)
    metrics = made.train_step(make_groups(4), policy_version=1)
    assert metrics["learner/weight/max"] == 1.0
    assert metrics["learner/ratio/max"] > 1.5


def test_gap_is_measured_on_fresh_tokens_only(tiny_model: Path, device: torch.device, tmp_path: Path) -> None:
    made = trainer(rl_config(tiny_model), device, tmp_path)
    assert "learner/logprob_gap/mean" not in made.train_step(make_groups(4), policy_version=2)
    assert made.train_step(make_groups(4), policy_version=1)["learner/logprob_gap/mean"] > 0


@pytest.mark.parametrize(("mode", "version", "allowed"), [("async", 2, True), ("async", 3, False), ("sync", 1, False)])
def test_groups_past_the_staleness_bound_are_refused(
    mode: str, version: int, allowed: bool, tiny_model: Path, device: torch.device, tmp_path: Path
) -> None:
    """The oldest token of make_groups is of version 0; max_staleness is 2."""
    config = rl_config(tiny_model).model_copy(update={"mode": mode})
    made = trainer(config, device, tmp_path)
    before = weights(made)
    if allowed:
        made.train_step(make_groups(4), policy_version=version)
        assert not torch.equal(weights(made), before)
        return
    with pytest.raises(ReplayBufferError, match=f"past max_staleness = {config.staleness_bound}"):
        made.train_step(make_groups(4), policy_version=version)
    assert torch.equal(weights(made), before)


def test_a_wrong_number_of_groups_is_refused(tiny_model: Path, device: torch.device, tmp_path: Path) -> None:
    with pytest.raises(AsyncRLError, match=r"needs 4 groups per step; the ranks got \[3\]"):
        trainer(rl_config(tiny_model), device, tmp_path).train_step(make_groups(3), policy_version=1)


def with_logprobs(group: Group, value: float) -> Group:
    rollouts = tuple(
        dataclasses.replace(r, behaviour_logprobs=np.full_like(r.behaviour_logprobs, value)) for r in group.rollouts
    )
    return dataclasses.replace(group, rollouts=rollouts)


def test_a_loss_that_is_not_finite_raises_and_changes_nothing(
    tiny_model: Path, device: torch.device, tmp_path: Path
) -> None:
    made = trainer(rl_config(tiny_model), device, tmp_path)
    before = weights(made)
    groups = [with_logprobs(group, float("nan")) for group in make_groups(4)]
    with pytest.raises(AsyncRLError, match="must be finite"):
        made.train_step(groups, policy_version=1)
    assert torch.equal(weights(made), before)
    made.train_step(make_groups(4), policy_version=1)
    assert not torch.equal(weights(made), before)


def test_a_batch_without_anything_to_train_on_is_a_step_of_zero(
    tiny_model: Path, device: torch.device, tmp_path: Path
) -> None:
    failed = [
        dataclasses.replace(group, rollouts=tuple(dataclasses.replace(r, reward=float("nan")) for r in group.rollouts))
        for group in make_groups(4)
    ]
    metrics = trainer(rl_config(tiny_model), device, tmp_path).train_step(failed, policy_version=1)
    assert metrics["learner/tokens"] == 0
    assert metrics["learner/loss"] == 0
    assert metrics["learner/grad_norm"] == 0


def test_publish_gives_a_manifest(tiny_model: Path, device: torch.device, tmp_path: Path) -> None:
    made = trainer(rl_config(tiny_model), device, tmp_path)
    manifest = made.publish(0)
    assert manifest is not None
    assert manifest["version"] == 0
    assert Path(manifest["path"]).stat().st_size == manifest["nbytes"]
    made.close()
    assert not Path(manifest["path"]).exists()
