"""Packed, sharded scoring against a plain transformers forward of one row at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from learner_cases import process_group

from asyncrl.config import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learners.distributed import data_mesh
from asyncrl.learners.models import PolicyModel, load_policy
from asyncrl.learners.packing import Row, pack


def small(kind: str, folder: Path, tiny_model: Path) -> Path:
    """A model folder: the tiny Qwen3 (tied), a Llama with grouped heads and its own head, a Mistral with a window."""
    if kind == "qwen3":
        return tiny_model
    settings = {
        "vocab_size": 17,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(1)
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    else:
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**settings, sliding_window=4))
    model.save_pretrained(folder / kind)
    return folder / kind


def make_rows() -> list[Row]:
    rng = np.random.default_rng(0)
    rows = []
    for length in (7, 12, 7, 4, 9, 12, 2):
        trained = np.sort(rng.choice(np.arange(1, length), size=max(1, length // 2), replace=False))
        rows.append(Row(tokens=rng.integers(0, 17, length).astype(np.int32), trained=trained))
    return rows


def plain(folder: Path, rows: list[Row], temperature: float) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Logprobs per row and gradients of the sum of -logprob, with transformers alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    logprobs = []
    for row in rows:
        tokens = torch.from_numpy(row.tokens).long()
        logits = model(input_ids=tokens[None]).logits[0, :-1].float() / temperature
        all_logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        logprobs.append(all_logprobs[torch.from_numpy(row.trained) - 1])
    (-torch.cat(logprobs).sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [row.detach() for row in logprobs], gradients


def packed(model: PolicyModel, rows: list[Row], budget: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    logprobs: list[torch.Tensor] = [torch.zeros(0)] * len(rows)
    for micro in pack(rows, max_tokens=budget):
        scores = model(micro)
        (-scores.logprobs.sum()).backward()
        sizes = [rows[i].trained.size for i in micro.rows]
        for i, part in zip(micro.rows, scores.logprobs.detach().split(sizes), strict=True):
            logprobs[i] = part
    gradients = {name: p.grad.full_tensor() for name, p in model.causal_lm.named_parameters()}
    return logprobs, gradients


@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral"])
@pytest.mark.parametrize(("temperature", "recompute"), [(1.0, False), (0.7, True)])
def test_packed_scores_and_gradients_equal_one_row_at_a_time(
    kind: str, temperature: float, recompute: bool, tiny_model: Path, tmp_path: Path
) -> None:
    folder, rows = small(kind, tmp_path, tiny_model), make_rows()
    expected, expected_gradients = plain(folder, rows, temperature)
    with process_group() as device:
        model = load_policy(
            ModelConfig(path=str(folder)),
            mesh=data_mesh(device),
            device=device,
            temperature=temperature,
            activation_checkpointing=recompute,
        )
        actual, gradients = packed(model, rows, budget=28)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-5, msg=name)


def test_bfloat16_computes_low_and_keeps_float32_masters(tiny_model: Path) -> None:
    rows = make_rows()
    expected, _ = plain(tiny_model, rows, 1.0)
    with process_group() as device:
        config = ModelConfig(path=str(tiny_model), dtype="bfloat16")
        model = load_policy(config, mesh=data_mesh(device), device=device)
        actual, gradients = packed(model, rows, budget=100)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {g.dtype for g in gradients.values()} == {torch.float32}
    difference = (torch.cat(actual) - torch.cat(expected)).abs().max().item()
    assert 0 < difference < 0.2


def test_a_model_whose_logits_change_after_the_head_is_refused(tmp_path: Path) -> None:
    config = transformers.Gemma2Config(
        vocab_size=17, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16
    )
    transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    with process_group() as device, pytest.raises(ConfigError, match="final_logit_softcapping"):
        load_policy(ModelConfig(path=str(tmp_path / "gemma")), mesh=data_mesh(device), device=device)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with process_group() as device, pytest.raises(ConfigError, match="is no causal language model"):
        load_policy(ModelConfig(path=str(tmp_path)), mesh=data_mesh(device), device=device)


def test_a_model_whose_checkpoint_has_other_names_is_refused(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=17, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=32, head_dim=16
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    with process_group() as device, pytest.raises(ConfigError, match=r"other names in memory .* model\.layers\.0\.mlp"):
        load_policy(ModelConfig(path=str(tmp_path)), mesh=data_mesh(device), device=device)
