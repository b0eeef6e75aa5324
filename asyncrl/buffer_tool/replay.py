"""`asyncrl buffer replay`: train from a stored buffer, with the learners and the objective of a configuration."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from asyncrl.buffer.stored import in_order
from asyncrl.buffer_tool.source import find_source
from asyncrl.config import OfflineConfig, RLConfig
from asyncrl.config_load import load_config, resolved_toml
from asyncrl.errors import ConfigError
from asyncrl.offline_preflight import Versions, offline_preflight
from asyncrl.preflight import Preflight


def replay(
    directory: str,
    *,
    config: str,
    overrides: Sequence[str],
    versions: str,
    dry_run: bool,
    address: str | None,
) -> int:
    """Check everything, then train as `asyncrl launch` does; the exit status.

    Raises:
        AsyncRLError: nothing to train on, or a configuration that does not fit it.
    """
    settings = load_config(config, overrides)
    if not isinstance(settings, RLConfig):
        raise ConfigError(f'{config}: job = "{settings.job}"; a replay trains the policy of a job = "rl"')
    source = find_source(directory)
    shards = source.read()
    wanted = Versions.parse(versions)
    groups = [group for group in in_order(shards) if wanted.hold(group)]
    temperature = None if source.config is None else source.config.generators.temperature
    prepared, damaged = offline_preflight(settings, groups, source=source.path, temperature=temperature)
    for problem in [problem for shard in shards for problem in shard.problems] + damaged:
        print(f"left out: {problem}", file=sys.stderr)
    print(describe(prepared, source=str(source.path)))
    from asyncrl.launch import launch, placement_plan

    if not dry_run:
        return launch(prepared, address=address)
    print(resolved_toml(prepared.config))
    print("\n".join(f"# {line}".rstrip() for line in placement_plan(prepared.config, address).splitlines()))
    return 0


def describe(prepared: Preflight, *, source: str) -> str:
    """What is trained on, how old it is, and what of the configuration is not used."""
    config = prepared.config
    assert isinstance(config, OfflineConfig)
    a, b, refs = config.algorithm, config.buffer, [group.ref for group in prepared.stored]
    lines = [
        f"replay of {len(refs):,} groups of {source}",
        f"({sum(r.num_rows for r in refs):,} rollouts, {sum(r.num_tokens for r in refs):,} tokens)",
        f"sampled by policy versions {config.oldest_version}..{config.newest_version}; the learner starts as version "
        f"{config.first_version} from {config.model.path}",
        f"{config.steps} steps of {a.groups_per_step} groups, {b.sampling}, each used {b.max_uses} times at most",
        f"max_staleness is not enforced: nothing is dropped for its age (up to {config.staleness_bound} versions; "
        f"learner/staleness/* measures it)",
        _correction(config),
        "not used: [data] (no evaluation either), [reward], and [generators] but for temperature",
    ]
    return "# " + "\n# ".join(lines)


def _correction(config: OfflineConfig) -> str:
    a = config.algorithm
    if a.weight == "none" and a.anchor == "recompute":
        return (
            'caution: anchor = "recompute" with weight = "none" does not correct for the policy that sampled; '
            '[algorithm] weight = "truncate" does'
        )
    return (
        f'corrected by the recorded behaviour logprobs (anchor = "{a.anchor}", weight = "{a.weight}"); '
        f"learner/weight/ess and learner/kl/* tell how far the data is from the policy"
    )
