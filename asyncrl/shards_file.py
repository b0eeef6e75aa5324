"""shards.json of a run folder: where the shards of a run that goes on are. Written by launch, removed at its end."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.buffer.keys import CurveKeys, ShardAddress


@dataclass(frozen=True, slots=True)
class ShardsFile:
    """How another process on any host reaches the shards, or on the same host their files.

    Attributes:
        directories: of the shards, in the order of the addresses; on their hosts.
        keys: of the run's clients; None: everything is on loopback.
    """

    addresses: Sequence[ShardAddress]
    directories: Sequence[Path]
    keys: CurveKeys | None

    def write(self, path: Path) -> None:
        """The file holds the run's client keys, if there are any: only its owner may read it."""
        content = {
            "shards": [
                {**address.to_dict(), "directory": str(directory)}
                for address, directory in zip(self.addresses, self.directories, strict=True)
            ],
            "client_keys": None if self.keys is None else self.keys.to_dict(),
        }
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(content, file, indent=1)
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> ShardsFile | None:
        """None when there is none that can be read: the run ended, or has no buffer."""
        try:
            content = json.loads(path.read_text())
            keys = content["client_keys"]
            return cls(
                addresses=[ShardAddress.from_dict(shard) for shard in content["shards"]],
                directories=[Path(shard["directory"]) for shard in content["shards"]],
                keys=None if keys is None else CurveKeys.from_dict(keys),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
