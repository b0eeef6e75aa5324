"""What a model folder says about itself, read from its JSON: no torch, no transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Sizes that decide what fits.

    Attributes:
        architecture: e.g. "Qwen3ForCausalLM".
        max_position_embeddings: longest prompt plus response that the model can see; None: not bounded.
        head_dim: None if the configuration does not tell.
        vocab_size: None if the configuration does not tell.
    """

    architecture: str
    max_position_embeddings: int | None
    head_dim: int | None
    vocab_size: int | None


def read_model_folder(path: str) -> ModelInfo:
    """Check that a folder holds a Hugging Face causal language model with safetensors weights.

    Raises:
        ConfigError: with every problem found.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"[model] path = {path!r}: {_why_no_folder(path, folder)}")
    problems: list[str] = []
    config = _read_config(folder, path, problems)
    architecture = _architecture(config, path, problems) if config else ""
    _check_weights(folder, path, problems)
    _check_experts(config, path, problems)
    if problems:
        raise ConfigError(problems)
    return ModelInfo(
        architecture=architecture,
        max_position_embeddings=_positions(config),
        head_dim=_head_dim(config),
        vocab_size=config.get("vocab_size"),
    )


def _why_no_folder(path: str, folder: Path) -> str:
    looked = f"looked at {folder.absolute()}"
    if folder.is_symlink():
        return f"is a link to {folder.readlink()}, which does not exist; {looked}"
    if folder.exists():
        return f"is a file; give the folder of a Hugging Face model; {looked}"
    if path.endswith("-latest/model") or "-latest/" in path:
        return f"no such folder; {looked}; the run that makes it has not finished in this working directory"
    if path.count("/") == 1 and not path.startswith((".", "/", "~")) and not folder.parent.exists():
        return (
            f"no such folder; {looked}; models are not downloaded: fetch one with "
            f"`hf download {path} --local-dir FOLDER` and give FOLDER"
        )
    return f"no such folder; {looked}"


def _read_config(folder: Path, path: str, problems: list[str]) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"[model] path = {path!r}: no config.json in {folder.absolute()}; is it a Hugging Face model?")
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"[model] path = {path!r}: config.json cannot be read: {error}")
        return {}
    return config if isinstance(config, dict) else {}


def _architecture(config: dict[str, Any], path: str, problems: list[str]) -> str:
    names = [str(name) for name in config.get("architectures") or []]
    causal = [name for name in names if name.endswith(("ForCausalLM", "LMHeadModel"))]
    if not causal:
        problems.append(
            f"[model] path = {path!r}: not a causal language model: config.json says architectures = "
            f"{json.dumps(names)}; a name that ends with ForCausalLM is needed"
        )
    return causal[0] if causal else ""


def _check_weights(folder: Path, path: str, problems: list[str]) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            problems.append(f"[model] path = {path!r}: {index.name} cannot be read: {error!r}")
            return
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            problems.append(
                f"[model] path = {path!r}: {len(missing)} of {len(files)} weight files are missing: "
                f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}; copy the whole folder"
            )
    elif not any(folder.glob("*.safetensors")):
        other = sorted(p.name for p in folder.glob("*.bin"))
        found = f"only {other[0]}; convert it with save_pretrained" if other else "no weights at all"
        problems.append(f"[model] path = {path!r}: no .safetensors file in {folder.absolute()}, {found}")


def _check_experts(config: dict[str, Any], path: str, problems: list[str]) -> None:
    found = [key for key in EXPERT_COUNTS if isinstance(config.get(key), int) and config[key] > 1]
    if found:
        problems.append(
            f"[model] path = {path!r}: config.json says {found[0]} = {config[found[0]]}; mixture-of-experts models "
            "cannot be trained yet, take a dense one"
        )


def _positions(config: dict[str, Any]) -> int | None:
    """Positions of the model, stretched by its rope scaling (read as vLLM reads it)."""
    limit = config.get("max_position_embeddings")
    if not isinstance(limit, int):
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "yarn":
        limit = rope.get("original_max_position_embeddings", limit)
    return int(limit * rope.get("factor", 1.0)) if kind in ("yarn", "linear", "dynamic") else limit


def _head_dim(config: dict[str, Any]) -> int | None:
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if isinstance(config.get("head_dim"), int):
        return config["head_dim"]
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None
