"""Starts a prepared run on Ray, follows it, and leaves nothing behind.

cli -> preflight -> launch: join or start Ray, reserve one placement group, start all processes in it, hand them to the
coordinator, draw its progress until it ends. Every exit (end, error, Ctrl-C) goes through the same shutdown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.buffer import StoreSettings
from asyncrl.cluster import check_fits, explain, get_all, num_hosts, num_local_gpus, ray_cluster, reserve
from asyncrl.config import JobConfig, OfflineConfig, RLConfig
from asyncrl.display import Display
from asyncrl.interrupts import Interrupts
from asyncrl.placement import Placement, plan_placement
from asyncrl.preflight import Preflight
from asyncrl.progress import Progress
from asyncrl.run_folder import RunFolder
from asyncrl.shards_file import ShardsFile
from asyncrl.shared_folder import new_shared_folder
from asyncrl.wiring import Wiring, server_keys

SHUTDOWN_TIMEOUT_S = 20.0
HASTY_SHUTDOWN_S = 3.0
"""The same after a second Ctrl-C."""
POLL_S = 0.25


def launch(prepared: Preflight, *, address: str | None) -> int:
    """Run a checked job to its end. Returns the exit status: 0 done, 130 stopped by Ctrl-C.

    Args:
        address: a Ray cluster to join ("auto", "host:port" or "ray://host:port"); None: join the one that runs on this
            machine, or start one that ends with the run.

    Raises:
        AsyncRLError: with the first cause, when a part fails.
    """
    config = prepared.config
    with Interrupts() as interrupts, ray_cluster(config, address) as placement:
        interrupts.install()
        run_folder = RunFolder.create(config, note=prepared.note)
        with Display(config, run_folder) as display, _Members(placement, run_folder, interrupts) as members:
            display.say(f"run folder {run_folder.path}")
            stopped = _run(prepared, members, display, interrupts)
    return 130 if stopped else 0


def placement_plan(config: JobConfig, address: str | None) -> str:
    """The processes and resources of a run, as text: on the cluster at `address`, else on this machine.

    Raises:
        ConfigError: they do not fit, or no cluster answers there.
    """
    if address is not None:
        with ray_cluster(config, address) as placement:
            return placement.describe()
    num_gpus = num_local_gpus()
    placement = plan_placement(config, use_gpus=num_gpus > 0)
    check_fits(placement, {"CPU": math.inf, "GPU": num_gpus})  # a Ray of our own has the CPUs that the run wants
    return placement.describe()


def _run(prepared: Preflight, members: _Members, display: Display, interrupts: Interrupts) -> bool:
    """Start everything, then follow the run. Returns whether the user stopped it."""
    display.update(Progress(job=prepared.config.name, num_steps=prepared.config.steps, phase="starting processes"))
    try:
        members.start(prepared)
        with interrupts.deferred():
            return _follow(members, display, interrupts)
    except RayError as error:
        raise explain(error, members.run_folder) from error
    finally:
        display.finish()


def _follow(members: _Members, display: Display, interrupts: Interrupts) -> bool:
    """Draw the run until it ends. The first Ctrl-C asks it to stop after the current step, the second ends it now."""
    finished = members.coordinator.run.remote()
    stopping = False
    while True:
        done, _ = ray.wait([finished], timeout=POLL_S)
        display.update(ray.get(members.coordinator.progress.remote()))
        if done:
            ray.get(finished)
            return stopping
        if interrupts.count and not stopping:
            stopping = True
            display.say("Ctrl-C: finishing the current step, then saving the model (again: stop at once)")
            ray.get(members.coordinator.stop.remote())


class _Members:
    """All processes of a run in one placement group. Leaving the context ends them, whatever state they are in."""

    def __init__(self, placement: Placement, run_folder: RunFolder, interrupts: Interrupts) -> None:
        self._placement = placement
        self._interrupts = interrupts
        self.run_folder = run_folder
        self._group: PlacementGroup | None = None
        self._actors: dict[str, Any] = {}
        self._shared = new_shared_folder()

    def __enter__(self) -> _Members:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        try:
            self._shut_down(timeout_s=HASTY_SHUTDOWN_S if exc_type is KeyboardInterrupt else SHUTDOWN_TIMEOUT_S)
        except KeyboardInterrupt:
            pass  # the user will not wait
        finally:
            self._interrupts.ignore()
            for actor in self._actors.values():
                ray.kill(actor)
            if self._group is not None:
                remove_placement_group(self._group)
            self._shared.remove()
            self.run_folder.shards.unlink(missing_ok=True)

    def _shut_down(self, *, timeout_s: float) -> None:
        shards = [a for name, a in self._actors.items() if name.startswith("shard-")]
        members = [a for name, a in self._actors.items() if name != "coordinator" and a not in shards]
        for actors in (members, shards):  # a shard seals its files when its writers are gone
            calls = [a.shutdown.remote() for a in actors]
            ray.wait(calls, num_returns=len(calls), timeout=timeout_s) if calls else None

    @property
    def coordinator(self) -> Any:
        return self._actors["coordinator"]

    def start(self, prepared: Preflight) -> None:
        """Reserve, start and connect everything."""
        self._group = reserve(self._placement)
        config = prepared.config
        from asyncrl.coordinator_actor import CoordinatorActor

        self._spawn("coordinator", CoordinatorActor, config, run_folder=self.run_folder)
        if isinstance(config, RLConfig):
            self._start_rl(config, prepared)
        else:
            learners = self._spawn_learners(config)
            get_all(self._start_learners(config, learners))
            ray.get(self.coordinator.connect_supervised.remote(learners=learners))

    def _start_rl(self, config: RLConfig, prepared: Preflight) -> None:
        from asyncrl.actors.generator_actor import GeneratorActor
        from asyncrl.buffer import new_keys
        from asyncrl.buffer.shard_actor import ShardActor

        # On one host everything stays on loopback; across hosts every socket is encrypted with keys of this run.
        clients = new_keys() if num_hosts() > 1 else None
        shards = [
            self._spawn(
                name,
                ShardActor,
                log=self.run_folder.log(name),
                directory=self._shard_directory(config, name),
                settings=self._store_settings(config, name),
                shared_dir=self._shared.path,
                keys=server_keys(clients),
            )
            for name in _names("shard", config.buffer.num_shards)
        ]
        learners = self._spawn_learners(config)
        generators = {
            name: self._spawn(name, GeneratorActor, name=name, log=self.run_folder.log(name))
            for name in _names("generator", config.num_generators)
        }
        addresses = ray.get([s.address.remote() for s in shards])
        wiring = Wiring(addresses, clients, str(self._shared.path))
        directories = [self._shard_directory(config, name) for name in _names("shard", len(shards))]
        ShardsFile(addresses, directories, clients).write(self.run_folder.shards)
        starting = self._start_learners(config, learners, wiring=wiring)
        starting += [g.start.remote(config, wiring=wiring, coordinator=self.coordinator) for g in generators.values()]
        get_all(starting)
        if isinstance(config, OfflineConfig):
            stored = ray.put(prepared.stored)
            ray.get(self.coordinator.connect_offline.remote(groups=stored, learners=learners, wiring=wiring))
            return
        ray.get(
            self.coordinator.connect_rl.remote(
                prompts=prepared.prompts,
                eval_prompts=prepared.eval_prompts,
                learners=learners,
                generators=generators,
                wiring=wiring,
            )
        )

    def _shard_directory(self, config: RLConfig, name: str) -> Path:
        in_memory = config.buffer.durability == "memory"
        return (self._shared.path if in_memory else self.run_folder.path) / "buffer" / name

    def _store_settings(self, config: RLConfig, name: str) -> StoreSettings:
        b = config.buffer
        return StoreSettings(
            durability=b.durability,
            capacity_bytes=int(b.capacity_gb * 1e9),
            memory_bytes=None if b.memory_gb is None else int(b.memory_gb * 1e9),
            spill_dir=None if b.memory_gb is None else self.run_folder.path / "buffer" / name,
            keep=b.keep,
        )

    def _spawn_learners(self, config: JobConfig) -> list[Any]:
        from asyncrl.learners.learner_actor import LearnerActor

        return [
            self._spawn(name, LearnerActor, rank=i, log=self.run_folder.log(name))
            for i, name in enumerate(_names("learner", config.learners.num_ranks))
        ]

    def _start_learners(self, config: JobConfig, learners: Sequence[Any], wiring: Wiring | None = None) -> list[Any]:
        ranks = {"num_ranks": len(learners), "init_method": ray.get(learners[0].rendezvous.remote())}
        return [r.start.remote(config, wiring=wiring, **ranks) for r in learners]

    def _spawn(self, process: str, actor_class: Any, /, *args: Any, **kwargs: Any) -> Any:
        index = [b.process for b in self._placement.bundles].index(process)
        bundle = self._placement.bundles[index]
        assert self._group is not None
        environment = {"OMP_NUM_THREADS": str(max(1, int(bundle.cpus)))}
        if not bundle.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""  # Ray would leave all of them visible
        self._actors[process] = actor_class.options(
            num_cpus=bundle.cpus,
            num_gpus=bundle.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
            runtime_env={"env_vars": environment},
        ).remote(*args, **kwargs)
        return self._actors[process]


def _names(kind: str, num: int) -> list[str]:
    return [f"{kind}-{i}" for i in range(num)]
