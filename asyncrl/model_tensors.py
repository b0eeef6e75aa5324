"""What a model folder says its weights are, so that new ones are compared with it before the engine is touched."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from asyncrl.errors import WeightSyncError
from asyncrl.weights import WeightManifest

LM_HEAD = "lm_head.weight"
NAMES_SHOWN = 3


def expected_tensors(model_path: str | Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the folder's safetensors files: what every later version must hold.

    Left out is what a publisher may leave out: lm_head.weight of a model with tied embeddings, and rotary buffers.

    Raises:
        WeightSyncError: no readable safetensors files.
    """
    folder = Path(model_path)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightSyncError(f"{folder} has no *.safetensors files; save the model with save_pretrained")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with open(file, "rb") as stream:
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise WeightSyncError(f"{file} has no readable safetensors header: {error!r}") from error
    if _embeddings_are_tied(folder):
        shapes.pop(LM_HEAD, None)
    return {name: shape for name, shape in shapes.items() if not _is_optional(name)}


def num_parameters(model_path: str | Path) -> int:
    """Elements of all expected tensors."""
    return sum(math.prod(shape) for shape in expected_tensors(model_path).values())


def check_tensors(manifest: WeightManifest, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise WeightSyncError unless the manifest holds exactly the expected tensors in the expected shapes."""
    found = {entry.name: entry.shape for entry in manifest.tensors}
    problems = [
        *_listed("missing", [name for name in expected if name not in found]),
        *_listed("unknown", [n for n in found if n not in expected and n != LM_HEAD and not _is_optional(n)]),
        *_listed(
            "of another shape",
            [f"{n} {found[n]} instead of {s}" for n, s in expected.items() if found.get(n, s) != s],
        ),
    ]
    if problems:
        raise WeightSyncError(f"weights of version {manifest.version} do not fit the model: {'; '.join(problems)}")


def _listed(what: str, names: list[str]) -> list[str]:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return [f"{len(names)} {what}: {', '.join(names[:NAMES_SHOWN])}{more}"] if names else []


def _is_optional(name: str) -> bool:
    return name.endswith("rotary_emb.inv_freq")


def _embeddings_are_tied(folder: Path) -> bool:
    config = folder / "config.json"
    return config.exists() and bool(json.loads(config.read_text()).get("tie_word_embeddings", False))
