"""Ray for a run: join or start a cluster, reserve the placement group, and turn Ray's errors into ours."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import ray
from ray._private.utils import read_ray_address
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group

from asyncrl.config import JobConfig
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.placement import Placement, plan_placement
from asyncrl.run_folder import RunFolder

logger = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 5.0
SYSTEM_CONFIG = {"kill_child_processes_on_worker_exit_with_raylet_subreaper": True}
"""An engine's inner processes end with their actor, even one that was killed."""


@contextlib.contextmanager
def ray_cluster(config: JobConfig, address: str | None) -> Iterator[Placement]:
    """Connect to Ray for the length of a run and yield the placement that fits it.

    Args:
        address: a cluster to join; "auto": the one that RAY_ADDRESS names or `ray start` runs on this machine; None: as
            "auto", or where there is none a new one that ends with the run; "local": always a new one. A new one on
            CPUs gets as many logical CPUs as the run asks for, so that a laptop with two cores runs every example.

    Raises:
        ConfigError: no cluster at that address, or it is too small.
    """
    options = {"log_to_driver": False, "logging_level": logging.ERROR}
    wanted = _running_cluster() if address in (None, "auto") else address
    if wanted is None and address == "auto":
        raise ConfigError("--address auto: no Ray cluster runs on this machine; start one with `ray start --head`")
    if wanted not in (None, "local"):
        try:
            _probe(wanted)
            # Ray reads the cluster's token for "auto" alone, which is the one of `ray start` where that lives.
            ray.init(address="auto" if wanted == read_ray_address() else wanted, **options)
        except (OSError, ValueError, RuntimeError) as error:
            if address is not None or os.environ.get("RAY_ADDRESS"):
                raise ConfigError(f"--address {wanted}: no Ray cluster answers there ({_first_line(error)})") from error
    if not ray.is_initialized():
        _start_embedded(config, options)
    try:
        resources = ray.cluster_resources()
        placement = plan_placement(config, use_gpus=resources.get("GPU", 0) > 0)
        check_fits(placement, resources)
        yield placement
    finally:
        ray.shutdown()


def _running_cluster() -> str | None:
    """Not one that another program started for itself, which would end with it."""
    address = os.environ.get("RAY_ADDRESS") or "auto"
    return (read_ray_address() or None) if address == "auto" else address


def check_fits(placement: Placement, resources: Mapping[str, float]) -> None:
    """Raises ConfigError when a cluster with these resources is too small."""
    shortage = placement.shortage(resources)
    if shortage:
        raise ConfigError(
            f"this run does not fit the Ray cluster: {shortage}.\n{placement.describe()}\n"
            "Lower [generators] num or [learners] num_ranks, or add nodes; with too few GPUs, "
            '[learners] device = "cpu" leaves them to the engines'
        )


def _start_embedded(config: JobConfig, options: dict[str, Any]) -> None:
    num_gpus = num_local_gpus()
    num_cpus = max(os.cpu_count() or 1, plan_placement(config, use_gpus=num_gpus > 0).num_cpus)
    ray.init(
        address="local",
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        include_dashboard=False,
        _system_config=SYSTEM_CONFIG,
        **options,
    )


def reserve(placement: Placement) -> PlacementGroup:
    """Take the resources of the whole run at once, close together.

    Raises:
        ConfigError: they exist but stay taken by others; names what is free.
    """
    group = placement_group([b.to_ray() for b in placement.bundles], strategy="PACK")
    try:
        ray.get(group.ready(), timeout=PLACEMENT_TIMEOUT_S)
    except GetTimeoutError:
        free = ", ".join(f"{v:g} {k}" for k, v in ray.available_resources().items() if k in ("CPU", "GPU")) or "nothing"
        raise ConfigError(
            f"the cluster did not free the resources of this run within {PLACEMENT_TIMEOUT_S:.0f} s; free now: {free}."
            f"\n{placement.describe()}"
        ) from None
    return group


def get_all(calls: Sequence[Any]) -> None:
    """Wait for remote calls; the first error is raised at once, whatever the others still do."""
    pending = list(calls)
    while pending:
        done, pending = ray.wait(pending, num_returns=1)
        ray.get(done)


def num_hosts() -> int:
    """Live nodes of the cluster."""
    return sum(node["Alive"] for node in ray.nodes())


def num_local_gpus() -> int:
    """GPUs of this machine that the installed torch can use, without starting Ray."""
    import torch

    return torch.cuda.device_count()


def explain(error: RayError, run_folder: RunFolder) -> AsyncRLError:
    """The first cause of a failed remote call, as one of our errors."""
    cause: BaseException = error
    while isinstance(cause, RayTaskError) and isinstance(cause.cause, BaseException):
        cause = cause.cause
    logs = f"(logs: {run_folder.logs})"
    if isinstance(cause, AsyncRLError):
        return type(cause)(f"{cause} {logs}")
    if isinstance(cause, RayActorError) and cause.actor_init_failed:
        # The trace of an error at the start of an actor is all in the text; its last line is the error.
        return AsyncRLError(f"{str(cause).strip().splitlines()[-1].removeprefix('asyncrl.errors.')} {logs}")
    if isinstance(cause, RayActorError):
        return AsyncRLError(f"a process of the run died: {_actor(cause)}{_first_line(cause)} {logs}")
    # Not one of ours: a bug, or a library's failure. The message alone would not do.
    with contextlib.suppress(OSError):  # a full disk, for one
        run_folder.log("driver").write_text(str(error))
    return AsyncRLError(f"{type(cause).__name__}: {cause} (traceback: {run_folder.log('driver')})")


def _probe(address: str) -> None:
    """Raises OSError or ValueError when nothing listens at HOST:PORT: Ray itself would try for many minutes."""
    url = urlsplit(address if "://" in address else f"ray://{address}")
    if url.hostname is None or url.port is None:
        raise ValueError("an address is auto, HOST:PORT or ray://HOST:PORT")
    socket.create_connection((url.hostname, url.port), timeout=PROBE_TIMEOUT_S).close()


def _actor(error: RayActorError) -> str:
    """The class and process id of the actor that died, as far as Ray's message tells them."""
    told = dict(re.findall(r"^\s*(class_name|pid): (\S+)", str(error), re.MULTILINE))
    return f"{told['class_name']} (process {told.get('pid', 'unknown')}). " if "class_name" in told else ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
