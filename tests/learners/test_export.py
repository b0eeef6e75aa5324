from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest
import torch
import transformers
from learner_cases import process_group

from asyncrl.config import ModelConfig
from asyncrl.errors import CheckpointError, WeightSyncError
from asyncrl.learners import export
from asyncrl.learners.distributed import data_mesh
from asyncrl.learners.models import PolicyModel, load_policy
from asyncrl.weights import WeightPublisher, open_weights


def load(folder: Path, device: torch.device) -> PolicyModel:
    return load_policy(ModelConfig(path=str(folder)), mesh=data_mesh(device), device=device)


def test_a_saved_folder_is_the_model(tiny_model: Path, tmp_path: Path) -> None:
    with process_group() as device:
        model = load(tiny_model, device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        expected = {name: p.full_tensor().detach() for name, p in model.causal_lm.named_parameters()}
        export.save(model, tmp_path / "out", source=str(tiny_model))
        export.save(model, tmp_path / "out", source=str(tiny_model))  # replaces the first
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    actual = dict(loaded.named_parameters())
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    source = transformers.GenerationConfig.from_pretrained(tiny_model)
    assert loaded.generation_config.eos_token_id == source.eos_token_id == 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("483920=")["input_ids"]) == "483920="


def test_a_bfloat16_model_is_saved_in_bfloat16(tiny_model: Path, tmp_path: Path) -> None:
    half = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    transformers.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "half")
    with process_group() as device:
        model = load(tmp_path / "half", device)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        export.save(model, tmp_path / "out", source=str(tmp_path / "half"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), half.parameters(), strict=True))


def test_a_save_that_fails_leaves_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with process_group() as device, pytest.raises(CheckpointError, match="could not be written"):
        export.save(load(tiny_model, device), tmp_path / "file" / "out", source=str(tiny_model))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_published_weights_have_checkpoint_names_and_the_tied_head_only_once(tiny_model: Path, tmp_path: Path) -> None:
    source = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    publisher = WeightPublisher(tmp_path / "weights")
    with process_group() as device:
        model = load(tiny_model, device)
        manifest = export.publish(model, publisher, version=3, dtype=torch.float32)
        assert manifest is not None and manifest.version == 3
        published = {name: tensor.clone() for name, tensor in dict(open_weights(manifest)).items()}
        assert published.keys() == dict(source.named_parameters()).keys()
        assert "lm_head.weight" not in published
        for name, parameter in source.named_parameters():
            assert torch.equal(published[name], parameter), name
    publisher.close()


def test_weights_that_are_not_finite_are_not_published(tiny_model: Path, tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "weights")
    with process_group() as device:
        model = load(tiny_model, device)
        with torch.no_grad():
            model.causal_lm.model.layers[1].mlp.up_proj.weight.fill_(float("nan"))
        with pytest.raises(WeightSyncError, match="finite"):
            export.publish(model, publisher, version=0, dtype=torch.float32)
    publisher.close()


def test_a_full_disk_is_an_error_of_the_save_on_every_rank(tiny_model: Path, tmp_path: Path) -> None:
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with process_group() as device:
        model = load(tiny_model, device)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            with pytest.raises(CheckpointError, match="could not be written"):
                export.save(model, tmp_path / "out", source=str(tiny_model))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())
