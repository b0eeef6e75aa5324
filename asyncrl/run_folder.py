"""The folder of one run: where every file of it goes, by name."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import JobConfig
from asyncrl.config_load import resolved_toml
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of a run; create() makes the folder, the other users only join names."""

    path: Path

    @classmethod
    def create(cls, config: JobConfig, *, note: str = "") -> RunFolder:
        """Make runs_dir/NAME-TIME with the resolved config, and point runs_dir/NAME-latest to it.

        Args:
            note: lines that go before the config as comments.
        """
        runs_dir = Path(config.runs_dir).absolute()
        stamp = time.strftime("%Y%m%d-%H%M%S")
        try:
            run = cls(_make_unused(runs_dir, f"{config.name}-{stamp}"))
            run.logs.mkdir()
            run.rollouts.mkdir()
            comment = "".join(f"# {line}\n" for line in note.splitlines())
            (run.path / "config.toml").write_text(comment + resolved_toml(config))
            _replace_link(runs_dir / f"{config.name}-latest", run.path.name)
        except OSError as error:
            raise ConfigError(f"runs_dir = {config.runs_dir!r} cannot be written: {error}") from error
        return run

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def model(self) -> Path:
        """The final model, a Hugging Face folder."""
        return self.path / "model"

    @property
    def shards(self) -> Path:
        """Addresses of the buffer's shards while the run goes on, see shards_file."""
        return self.path / "shards.json"

    def checkpoint(self, step: int) -> Path:
        """The model after `step` optimizer batches, a Hugging Face folder."""
        return self.path / "checkpoints" / f"step_{step:06d}"

    def rollout_sample(self, step: int) -> Path:
        return self.rollouts / f"step_{step:06d}.parquet"

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"


def _make_unused(parent: Path, name: str) -> Path:
    """Make parent/name, or parent/name-2, -3, ... where that exists."""
    parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, 1000):
        path = parent / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise OSError(f"{parent / name} and 998 folders numbered after it exist already")


def _replace_link(link: Path, target: str) -> None:
    """Point `link` to `target` in one step; a folder of that name is left alone and reported by OSError."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.symlink_to(target)
    try:
        os.replace(temporary, link)
    except OSError:
        temporary.unlink()
        raise
