"""`asyncrl buffer stats | tail | verify | export | replay`: what a replay buffer holds, beside the run or after it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from asyncrl.errors import ConfigError

OK, BAD = 0, 1


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `buffer` and what follows it."""
    parser = commands.add_parser("buffer", help="look into a replay buffer, export it, train from it")
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", title="commands", required=True)

    stats = verbs.add_parser("stats", help="contents and totals of every shard, of a run that goes on or ended")
    stats.add_argument("source", metavar="RUN", help="a run folder or its name (NAME-latest), or a folder of shards")
    stats.add_argument("--json", action="store_true", help="one JSON object instead of a table")

    tail = verbs.add_parser("tail", help="the newest groups: prompt, versions, rewards, text")
    tail.add_argument("source", metavar="RUN", help="a run folder or its name, or a folder of shards")
    tail.add_argument("-n", type=int, default=5, metavar="N", help="how many groups (default 5)")
    tail.add_argument("--rollouts", type=int, default=4, metavar="K", help="of each group, at most (default 4)")
    tail.add_argument("--follow", action="store_true", help="go on with groups as they come, until Ctrl-C")

    verify = verbs.add_parser("verify", help="check every file and group; exit status 1 if anything is bad")
    verify.add_argument("source", metavar="DIR", help="a run folder, a shard folder or a snapshot")

    export = verbs.add_parser("export", help="all groups as one Parquet file, for pandas, DuckDB, pyarrow")
    export.add_argument("source", metavar="DIR", help="a run folder, a shard folder or a snapshot")
    export.add_argument("--to", choices=["parquet"], required=True)
    export.add_argument(
        "--out", metavar="PATH", help="a new file, or a folder for trajectories.parquet; omitted: the run folder"
    )

    replay = verbs.add_parser(
        "replay",
        help="train from a stored buffer, without generators",
        usage="asyncrl buffer replay DIR --config FILE [--versions FIRST:LAST] [--dry-run] [--address ADDRESS] "
        "[--section.key=value ...]",
    )
    replay.add_argument("directory", metavar="DIR", help="a run folder, a shard folder or a snapshot")
    replay.add_argument(
        "--config", metavar="FILE", required=True, help="as for launch; [data] and [reward] are not used"
    )
    replay.add_argument(
        "--versions", metavar="FIRST:LAST", default=":", help="only groups sampled by these policy versions, e.g. 40:60"
    )
    replay.add_argument("--dry-run", action="store_true", help="check everything and say what would be trained on")
    replay.add_argument("--address", metavar="ADDRESS", help="Ray cluster to run on, as for launch")


def run(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run the command that was parsed; the exit status.

    Args:
        rest: what the parser did not know: the settings of a replay.
    """
    if arguments.verb == "replay":
        from asyncrl.buffer_tool.replay import replay

        return replay(
            arguments.directory,
            config=arguments.config,
            overrides=rest,
            versions=arguments.versions,
            dry_run=arguments.dry_run,
            address=arguments.address,
        )
    if rest:
        raise ConfigError(f"(command line): unexpected {rest[0]!r}; see `asyncrl buffer {arguments.verb} --help`")
    from asyncrl.buffer_tool.source import find_source

    source = find_source(arguments.source)
    if arguments.verb == "stats":
        from asyncrl.buffer_tool.stats import print_stats

        print_stats(source, as_json=arguments.json)
        return OK
    if arguments.verb == "tail":
        from asyncrl.buffer_tool.tail import tail

        tail(source, num_groups=arguments.n, num_rollouts=arguments.rollouts, follow=arguments.follow)
        return OK
    from asyncrl.buffer_tool import files

    if arguments.verb == "verify":
        return OK if files.verify(source) else BAD
    out = None if arguments.out is None else Path(arguments.out)
    return OK if files.export(source, out) else BAD
