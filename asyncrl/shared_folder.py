"""The folder in shared memory that the processes of one run have on each host, and its removal by the last of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from pathlib import Path

from asyncrl.buffer import shared_memory
from asyncrl.errors import ConfigError

PREFIX = "asyncrl-"
ALIVE = "alive"


class SharedFolder:
    """Makes and holds the folder; the kernel lets go of it when the process dies, however that comes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._fd = self._hold()

    def _hold(self) -> int:
        alive = self.path / ALIVE
        while True:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                fd = os.open(alive, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue  # removed in between by the last of the others
            fcntl.flock(fd, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(fd).st_ino == alive.stat().st_ino:
                    return fd
            os.close(fd)

    def close(self) -> None:
        """Let go; the last holder removes the folder."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            _remove_unless_held(self.path)

    def remove(self) -> None:
        """Let go and remove the folder, whoever holds it: the run is over."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()


def check_room(path: str | Path, nbytes: int, *, what: str) -> None:
    """Raises ConfigError when the file system of an existing `path` has less than `nbytes` free."""
    free = shutil.disk_usage(path).free
    if free < nbytes:
        raise ConfigError(
            f"{path}: {what} needs {nbytes / 1e6:,.0f} MB of shared memory, {free / 1e6:,.0f} MB are free; "
            "enlarge /dev/shm (docker run --shm-size=..., a memory volume in Kubernetes)"
        )


def new_shared_folder() -> SharedFolder:
    """A folder for a new run, after removing those of runs whose processes are all dead."""
    parent = Path(shared_memory())
    for path in parent.glob(f"{PREFIX}*"):
        _remove_unless_held(path)
    return SharedFolder(parent / f"{PREFIX}{uuid.uuid4().hex[:12]}")


def _remove_unless_held(path: Path) -> None:
    """One without the file ALIVE is left alone: nobody knows whose it is."""
    with contextlib.suppress(OSError):  # held, gone, or another user's
        fd = os.open(path / ALIVE, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(fd)
