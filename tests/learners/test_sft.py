from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from learner_cases import process_group, sft_config

from asyncrl.data import Demonstration
from asyncrl.errors import DataError
from asyncrl.learners import SFTTrainer
from asyncrl.learners.sft import _rows, draw


def test_order_is_seeded_and_every_epoch_holds_every_row_once() -> None:
    order = draw(range(30), num_rows=10, seed=3)
    assert order == draw(range(30), num_rows=10, seed=3)
    assert order != draw(range(30), num_rows=10, seed=4)
    for epoch in range(3):
        assert sorted(order[epoch * 10 : (epoch + 1) * 10]) == list(range(10))
    assert order[:10] != order[10:20]
    # A batch is a window of that sequence, also across an epoch's end: a resumed run continues it.
    assert draw(range(8, 14), num_rows=10, seed=3) == order[8:14]


def test_only_the_response_is_trained() -> None:
    (row,) = _rows([Demonstration(tokens=[5, 6, 7, 8, 1], prompt_length=3, row_id="x:1")])
    assert row.trained.tolist() == [3, 4]
    assert row.num_inputs == 4
    with pytest.raises(DataError, match="x:2"):
        _rows([Demonstration(tokens=[5, 6], prompt_length=2, row_id="x:2")])


def reference_loss(folder: Path, rows: list) -> float:
    """Mean over all trained tokens, by transformers, one row at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    losses = []
    for row in rows:
        tokens = torch.from_numpy(row.tokens).long()
        labels = torch.full_like(tokens, -100)
        labels[row.trained] = tokens[row.trained]
        logits = model(input_ids=tokens[None]).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, labels[1:], reduction="none")[labels[1:] != -100])
    return torch.cat(losses).mean().item()


@pytest.mark.parametrize("budget", [8192, 40])
def test_loss_is_the_token_mean_of_the_batch(budget: int, sort_task: Path) -> None:
    with process_group() as device:
        config = sft_config(sort_task, max_tokens_per_microbatch=budget)
        trainer = SFTTrainer(config, rank=0, world_size=1, device=device)
        batch = [trainer.train_rows[i] for i in draw(range(32), num_rows=2000, seed=0)]
        metrics = trainer.train_step(0)
    assert metrics["learner/loss"] == pytest.approx(reference_loss(sort_task / "model", batch), rel=1e-5)
    assert metrics["learner/tokens"] == sum(row.trained.size for row in batch)
    assert metrics["learner/lr"] == pytest.approx(2e-3 / 5)


def test_training_lowers_the_held_out_loss(sort_task: Path) -> None:
    with process_group() as device:
        trainer = SFTTrainer(sft_config(sort_task), rank=0, world_size=1, device=device)
        before = trainer.evaluate()
        assert before["eval/loss"] == pytest.approx(reference_loss(sort_task / "model", trainer.eval_rows), rel=1e-5)
        losses = [trainer.train_step(step)["learner/loss"] for step in range(30)]
        after = trainer.evaluate()
    assert losses[0] > 2.5 > 1.8 > np.mean(losses[-5:])
    assert after["eval/loss"] < before["eval/loss"] - 0.8
    assert after["eval/token_accuracy"] > before["eval/token_accuracy"] + 0.2
    assert after["eval/tokens"] == 64 * 7
