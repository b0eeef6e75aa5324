"""Writers and a reader of one buffer, in processes of their own."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from buffer_peers import PEERS, Peer
from buffer_workload import GROUP_SIZE, endless, make_pool

NUM_WRITERS = 2


def work(peer_name: str, config: Any, seed: int, pipe: Any) -> None:
    """A writer or reader: commands in, (trajectories, seconds, latencies in seconds) out."""
    peer = next(p for p in PEERS if p.name == peer_name)
    client, groups = peer.client(config), endless(make_pool(seed))
    pipe.send(None)
    while (command := pipe.recv()) is not None:
        kind, seconds, most = command
        latencies: list[float] = []
        num, start = 0, time.perf_counter()
        while num < most and time.perf_counter() - start < seconds:
            began = time.perf_counter()
            if kind == "write":
                client.put(next(groups))
                num += GROUP_SIZE
            elif (packed := client.sample()) is None:
                time.sleep(1e-3)
            else:
                latencies.append(time.perf_counter() - began)
                num += len(packed["starts"]) - 1
        client.flush()
        pipe.send((num, time.perf_counter() - start, latencies))
    client.close()


class Session:
    """A peer's server with its writers and its reader."""

    def __init__(self, peer: Peer, num_groups: int, **server: Any) -> None:
        self.server = peer.server(num_groups, **server)
        context = multiprocessing.get_context("fork" if peer.fork else "spawn")
        self._workers = []
        for seed in range(NUM_WRITERS + 1):
            pipe, theirs = context.Pipe()
            process = context.Process(target=work, args=(peer.name, self.server.config, seed, theirs), daemon=True)
            process.start()
            self._workers.append((process, pipe))
        for _, pipe in self._workers:
            pipe.recv()

    def fill(self, num: int) -> float:
        """Trajectories per second while that many are written."""
        return self._rate(self._run(self._workers[:-1], ("write", 600.0, num // NUM_WRITERS)))

    def write(self, seconds: float) -> float:
        return self._rate(self._run(self._workers[:-1], ("write", seconds, 1 << 60)))

    def sample(self, seconds: float, most: int = 1 << 60) -> tuple[float, list[float]]:
        results = self._run(self._workers[-1:], ("sample", seconds, most))
        return self._rate(results), results[0][2]

    def both(self, seconds: float) -> tuple[float, float, list[float]]:
        for kind, (_, pipe) in zip(["write"] * NUM_WRITERS + ["sample"], self._workers, strict=True):
            pipe.send((kind, seconds, 1 << 60))
        *writers, reader = [pipe.recv() for _, pipe in self._workers]
        return self._rate(writers), self._rate([reader]), reader[2]

    def _run(self, workers: list[Any], command: Any) -> list[Any]:
        for _, pipe in workers:
            pipe.send(command)
        return [pipe.recv() for _, pipe in workers]

    @staticmethod
    def _rate(results: list[Any]) -> float:
        return sum(num / seconds for num, seconds, _ in results)

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.send(None)
            process.join(10)
            if process.is_alive():
                process.kill()
        self.server.stop()


@contextmanager
def session(*args: Any, **kwargs: Any) -> Iterator[Session]:
    opened = Session(*args, **kwargs)
    try:
        yield opened
    finally:
        opened.close()
