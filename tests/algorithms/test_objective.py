"""Surrogate, weight, anchor and aggregate against the implementations in use (tests/goldens), and split invariance."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.diagnostics import MAXIMA, SUMS, diagnose, kl_estimates, summarise
from asyncrl.algorithms.objective import (
    AGGREGATES,
    ANCHORS,
    Objective,
    PolicyLoss,
    StepCounts,
    clip,
    weight_none,
    weight_truncate,
)
from asyncrl.config import AlgorithmConfig

GOLDENS = Path(__file__).parent.parent / "goldens"


def load(file: str, name: str) -> tuple[dict, dict]:
    """(inputs with the case's own replacing the shared ones, the case)."""
    golden = json.loads((GOLDENS / f"{file}.json").read_text())
    case = next(c for c in golden["cases"] if c["id"] == name)
    return golden["inputs"] | case.get("extra_inputs", {}), case


def tensor(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Padded:
    """Golden inputs [B, T] and how they look on the packed token axis."""

    def __init__(self, inputs: dict, *, mask: str = "mask", advantages: str = "seq") -> None:
        self.mask = tensor(inputs[mask]).bool()
        self.logp = tensor(inputs["logp"]).requires_grad_()
        self.old = tensor(inputs["old_logp"])
        self.behaviour = tensor(inputs.get("rollout_logp", inputs["old_logp"]))
        values = tensor(inputs["advantages"] if "advantages" in inputs else inputs[f"advantages_{advantages}"])
        self.advantages = values[:, None].expand(self.mask.shape) if values.ndim == 1 else values
        self.row_lengths = self.mask.sum(1, keepdim=True).expand(self.mask.shape)
        self.counts = StepCounts(tokens=int(self.mask.sum()), sequences=int(self.mask.any(1).sum()))

    def evaluate(self, objective: Objective, rows: slice = slice(None)) -> PolicyLoss:
        """The loss of some rows as one microbatch of the whole."""
        mask = self.mask[rows]

        def pick(x: Tensor) -> Tensor:
            return x[rows][mask]

        return objective.loss(
            pick(self.logp),
            recomputed=pick(self.old),
            behaviour=pick(self.behaviour),
            advantages=pick(self.advantages),
            row_lengths=pick(self.row_lengths),
            counts=self.counts,
        )

    def gradient(self, loss: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, self.logp)
        return gradient


def objective(
    *, low: float, high: float, weight=weight_none, anchor: str = "recompute", aggregate: str = "token_mean"
) -> Objective:
    return Objective(
        anchor=ANCHORS[anchor],
        surrogate=partial(clip, low=low, high=high),
        weight=weight,
        aggregate=AGGREGATES[aggregate],
    )


def check(padded: Padded, made: Objective, case: dict) -> PolicyLoss:
    tolerance = 1e-9 if case["dtype"] == "float64" else 1e-6
    result = padded.evaluate(made)
    assert result.loss.item() == pytest.approx(case["outputs"]["loss"], rel=tolerance, abs=tolerance)
    expected = tensor(case["outputs"]["grad_logp"])
    torch.testing.assert_close(padded.gradient(result.loss), expected, rtol=tolerance, atol=tolerance)
    return result


def names(file: str, *, without: tuple[str, ...] = ()) -> list[str]:
    golden = json.loads((GOLDENS / f"{file}.json").read_text())
    return [c["id"] for c in golden["cases"] if not any(part in c["id"] for part in without)]


@pytest.mark.parametrize("name", names("ppo_clip"))
def test_clip(name: str) -> None:
    inputs, case = load("ppo_clip", name)
    given = case["hyperparameters"]
    mask = "mask_hole" if given.get("mask") == "hole" else "mask"
    padded = Padded(inputs, mask=mask, advantages=given.get("advantages", "seq"))
    result = check(padded, objective(low=given["eps_low"], high=given["eps_high"]), case)
    metrics = case["outputs"].get("metrics", {})
    clipped = (result.surrogate.clipped_low | result.surrogate.clipped_high).double().mean().item()
    for key in ("actor/pg_clipfrac", "clip_ratio", "clip_ratio/region_mean"):
        if key in metrics:
            assert clipped == pytest.approx(metrics[key], abs=1e-8)
    if "clip_ratio/low_mean" in metrics:
        assert result.surrogate.clipped_low.double().mean().item() == pytest.approx(
            metrics["clip_ratio/low_mean"], abs=1e-8
        )
    if "probs_ratio" in metrics:
        assert result.ratio.mean().item() == pytest.approx(metrics["probs_ratio"], rel=1e-8)


def test_log_ratios_past_the_limit_have_no_gradient() -> None:
    inputs, _ = load("ppo_clip", "verl_extreme_logratio")
    padded = Padded(inputs)
    result = padded.evaluate(objective(low=0.2, high=0.2))
    extreme = (padded.logp - padded.old).abs() > 20
    assert extreme.sum() == 1
    assert padded.gradient(result.loss)[extreme].tolist() == [0.0]


@pytest.mark.parametrize(
    ("name", "maximum", "mask"),
    [
        ("verl_C2_contig", 2.0, "mask"),
        ("openrlhf_0_2_contig", 2.0, "mask"),
        ("areal_clamp2_contig", 2.0, "mask"),
        ("nemo_tis2_contig", 2.0, "mask"),
        ("slime_vanilla_tis_0_2", 2.0, "mask"),
        ("trl_token_truncate_3_hole", 3.0, "mask_hole"),
        ("skyrl_token_2_hole", 2.0, "mask_hole"),
    ],
)
def test_truncated_weight(name: str, maximum: float, mask: str) -> None:
    inputs, case = load("tis_loss", name)
    truncate = partial(weight_truncate, maximum=maximum)
    check(Padded(inputs, mask=mask), objective(low=0.2, high=0.2, weight=truncate), case)


@pytest.mark.parametrize(
    ("name", "mask", "weight", "anchor"),
    [
        ("areal_uncapped_contig", "mask", partial(weight_truncate, maximum=1e9), "recompute"),
        ("areal_uncapped_hole", "mask_hole", partial(weight_truncate, maximum=1e9), "recompute"),
        ("areal_rs_none", "mask", weight_none, "recompute"),
        ("verl_bypass_ppo_clip", "mask", weight_none, "behaviour"),
        # k = pi_anchor/mu is 1 under this anchor: the weight changes nothing.
        ("verl_bypass_ppo_clip", "mask", partial(weight_truncate, maximum=2.0), "behaviour"),
    ],
)
def test_anchors_of_decoupled_ppo(name: str, mask: str, weight, anchor: str) -> None:
    inputs, case = load("decoupled_ppo_loss", name)
    check(Padded(inputs, mask=mask), objective(low=0.2, high=0.2, weight=weight, anchor=anchor), case)


@pytest.mark.parametrize(
    ("name", "aggregate"),
    [
        ("verl_token-mean_contig", "token_mean"),
        ("trl_dapo_contig", "token_mean"),
        ("trl_bnpo_contig", "token_mean"),
        ("openrlhf_token", "token_mean"),
        ("verl_seq-mean-token-mean_contig", "sequence_mean"),
        ("trl_grpo_contig", "sequence_mean"),
        ("nemo_seq", "sequence_mean"),
        ("verl_seq-mean-token-mean_one_row_fully_masked", "sequence_mean"),
    ],
)
def test_aggregates(name: str, aggregate: str) -> None:
    inputs, case = load("dapo_token_mean_loss", name)
    check(Padded(inputs), objective(low=0.2, high=0.28, aggregate=aggregate), case)


@pytest.mark.parametrize("aggregate", sorted(AGGREGATES))
@pytest.mark.parametrize("cuts", [(2,), (1, 3, 4), (3, 4)])
@pytest.mark.parametrize("name", ["verl_token-mean_contig", "verl_seq-mean-token-mean_one_row_fully_masked"])
def test_a_split_into_microbatches_changes_neither_value_nor_gradient(
    aggregate: str, cuts: tuple[int, ...], name: str
) -> None:
    """With the fully masked row (row 3), the cuts (3, 4) also make a microbatch without any trained token."""
    inputs, _ = load("dapo_token_mean_loss", name)
    padded = Padded(inputs)
    made = objective(low=0.2, high=0.28, aggregate=aggregate)
    whole = padded.evaluate(made).loss
    bounds = [0, *cuts, padded.mask.shape[0]]
    parts = [padded.evaluate(made, slice(a, b)).loss for a, b in pairwise(bounds)]
    together = torch.stack(parts).sum()
    torch.testing.assert_close(together, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(padded.gradient(together), padded.gradient(whole), rtol=1e-12, atol=1e-12)


def test_the_mean_of_microbatch_means_would_be_another_value() -> None:
    """The negative control of the golden file: what a wrong normaliser gives."""
    inputs, case = load("dapo_token_mean_loss", "verl_token-mean_mean_of_microbatch_means")
    padded = Padded(inputs)
    assert padded.evaluate(objective(low=0.2, high=0.28)).loss.item() != pytest.approx(
        case["outputs"]["loss"], abs=0.05
    )


def test_the_weight_carries_no_gradient() -> None:
    inputs, _ = load("tis_loss", "verl_C2_contig")
    padded = Padded(inputs)
    padded.old = padded.logp  # as with one minibatch: the anchor is the current policy
    result = padded.evaluate(objective(low=0.2, high=0.2, weight=partial(weight_truncate, maximum=2.0)))
    expected = -(result.weight.values * padded.advantages[padded.mask]) / padded.counts.tokens
    torch.testing.assert_close(padded.gradient(result.loss)[padded.mask], expected)


def test_preset_from_config() -> None:
    inputs, case = load("tis_loss", "verl_C2_contig")
    config = AlgorithmConfig(name="grpo", weight="truncate", weight_max=2.0)
    check(Padded(inputs), Objective.from_config(config), case)


def diagnostics_of(padded: Padded, made: Objective, rows: slice = slice(None)):
    mask = padded.mask[rows]
    return diagnose(
        padded.evaluate(made, rows),
        logprobs=padded.logp[rows][mask],
        behaviour=padded.behaviour[rows][mask],
        entropy=torch.ones(int(mask.sum()), dtype=torch.float64),
        start=padded.old[rows][mask],
        fresh=torch.ones(int(mask.sum()), dtype=torch.bool),
    )


def test_diagnostics_equal_the_peers_and_add_up() -> None:
    inputs, case = load("tis_loss", "verl_C2_contig")
    padded = Padded(inputs)
    made = objective(low=0.2, high=0.2, weight=partial(weight_truncate, maximum=2.0))
    parts = [diagnostics_of(padded, made, rows) for rows in (slice(0, 2), slice(2, 3), slice(3, 6))]
    total = parts[0].add(parts[1]).add(parts[2])
    whole = diagnostics_of(padded, made)
    torch.testing.assert_close(total.sums, whole.sums)
    torch.testing.assert_close(total.maxima, whole.maxima)
    metrics = summarise(total.sums.tolist(), total.maxima.tolist())
    peer = case["outputs"]["rollout_corr_metrics"]
    assert metrics["weight/mean"] == pytest.approx(peer["rollout_is_mean"], abs=1e-7)
    assert metrics["weight/max"] == pytest.approx(peer["rollout_is_max"], abs=1e-7)
    assert metrics["weight/ess"] == pytest.approx(peer["rollout_is_eff_sample_size"], abs=1e-6)
    assert metrics["weight/limited_fraction"] == pytest.approx(peer["rollout_is_ratio_fraction_high"], abs=1e-7)
    assert metrics["entropy/mean"] == 1.0
    gap = (padded.old - padded.behaviour)[padded.mask].abs()
    assert metrics["logprob_gap/mean"] == pytest.approx(gap.mean().item())
    assert metrics["logprob_gap/max"] == pytest.approx(gap.max().item())


def test_kl_of_behaviour_and_policy_equals_the_peer() -> None:
    inputs, case = load("tis_loss", "verl_C2_contig")
    padded = Padded(inputs)
    k1, k3 = kl_estimates(padded.behaviour[padded.mask], padded.old[padded.mask])
    peer = case["outputs"]["rollout_corr_metrics"]
    assert k1.mean().item() == pytest.approx(peer["kl"], abs=1e-8)
    assert k3.mean().item() == pytest.approx(peer["k3_kl"], abs=1e-8)


def test_kl_estimates_equal_the_peers() -> None:
    for name, which in (("verl_k1", 0), ("verl_k3", 1)):
        inputs, case = load("kl_k1_k2_k3", name)
        estimate = kl_estimates(tensor(inputs["logp"]), tensor(inputs["ref_logp"]))[which]
        torch.testing.assert_close(estimate, tensor(case["outputs"]["kl"]), rtol=1e-9, atol=1e-9)


def test_no_fresh_token_leaves_the_gap_out() -> None:
    metrics = summarise([10.0] + [0.0] * (len(SUMS) - 1), [0.0] * len(MAXIMA))
    assert "logprob_gap/mean" not in metrics
    assert metrics["weight/ess"] == 1.0
