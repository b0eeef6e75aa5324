"""From what a user names (a run, a folder) to the shards behind it: their files, or the processes that serve them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncrl.buffer import BufferStats, ReplayBuffer
from asyncrl.buffer.stored import StoredShard, find_shards, read_stored
from asyncrl.config import RLConfig
from asyncrl.config_load import load_config
from asyncrl.errors import ConfigError, ReplayBufferError
from asyncrl.run_folder import RunFolder
from asyncrl.shards_file import ShardsFile

RUNS_DIR = Path("runs")
ANSWER_TIMEOUT_S = 3.0
HOW_TO_KEEP = 'only [buffer] durability = "disk" (or "fsync") with keep = true keeps the trajectories of a run'


@dataclass(frozen=True, slots=True)
class Source:
    """A run folder, a folder of shards, a shard folder or a snapshot.

    Attributes:
        config: of the run; None where there is no run folder.
        shards_file: of a run that has not ended in order: it goes on, or was killed.
    """

    path: Path
    config: RLConfig | None
    shards_file: ShardsFile | None

    @property
    def run_folder(self) -> RunFolder:
        return RunFolder(self.path)

    def folders(self) -> list[Path]:
        """Of the shards' files. Raises ReplayBufferError when they are gone, or never were there."""
        if self.shards_file is not None and all(d.is_dir() for d in self.shards_file.directories):
            return list(self.shards_file.directories)
        try:
            return find_shards(self.path)
        except ReplayBufferError:
            if self.config is not None and self.config.buffer.durability == "memory":
                raise ReplayBufferError(
                    f'{self.path}: this run had [buffer] durability = "memory" and has ended: its trajectories are '
                    f"gone; {HOW_TO_KEEP}"
                ) from None
            raise

    def read(self) -> list[StoredShard]:
        """What the shards' files hold. Raises as folders()."""
        folders = self.folders()
        spilled = [self.path / "buffer" / folder.name for folder in folders]
        try:
            return read_stored(folders, spilled=[p if p not in folders else Path() for p in spilled])
        except OSError as error:  # the run ended meanwhile, and took its folders with it
            raise ReplayBufferError(f"{self.path}: its files cannot be read: {error}") from error

    def ask(self) -> BufferStats | None:
        """What the shards of a run that goes on say of themselves; None: nobody answers."""
        if self.shards_file is None:
            return None
        try:
            with ReplayBuffer(
                self.shards_file.addresses, client_keys=self.shards_file.keys, timeout_s=ANSWER_TIMEOUT_S
            ) as buffer:
                return buffer.stats()
        except ReplayBufferError:
            return None


def find_source(name: str) -> Source:
    """A path, or the name of a run in ./runs (NAME-latest).

    Raises:
        ReplayBufferError: there is no such folder, or it is the folder of a run that has no buffer.
    """
    path = Path(name)
    if not path.exists() and (RUNS_DIR / name).exists():
        path = RUNS_DIR / name
    if not path.exists():
        raise ReplayBufferError(
            f"{name}: no such run or folder; give a run folder ({RUNS_DIR}/NAME-latest), a shard folder or a snapshot"
        )
    path = path.resolve()
    config = _config(path)
    if config is None and (path / "config.toml").is_file() and not any(path.glob("buffer/shard-*")):
        raise ReplayBufferError(
            f"{path} is not the folder of an RL run that this asyncrl can read: it has no replay buffer"
        )
    return Source(path, config, ShardsFile.read(RunFolder(path).shards))


def _config(path: Path) -> RLConfig | None:
    """Of the run, when this asyncrl can read it."""
    try:
        config = load_config(path / "config.toml")
    except ConfigError:
        return None
    return config if isinstance(config, RLConfig) else None
