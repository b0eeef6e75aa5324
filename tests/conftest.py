"""Fixtures that several test folders share."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parent.parent


def load_example(name: str):
    """Import examples/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def sort_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sorting task: model/ (random weights), demonstrations*.jsonl, prompts*.jsonl."""
    folder = tmp_path_factory.mktemp("sort")
    load_example("sort_digits").write_all(folder, num_train=2_000, num_eval=64)
    return folder


@pytest.fixture(scope="session")
def tiny_model(sort_task: Path) -> Path:
    """Folder of the randomly initialised 0.64M-parameter Qwen3 of the sorting task."""
    return sort_task / "model"
