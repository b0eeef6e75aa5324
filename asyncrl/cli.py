"""The `asyncrl` command. What takes long to import is imported when it is needed, after the cheap checks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from asyncrl import __version__
from asyncrl.buffer_tool import cli as buffer_cli
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.suggest import nearest

OK, USER_ERROR, INTERRUPTED = 0, 2, 130
FLAGS = ("config", "address", "dry-run", "versions", "help")

LAUNCH_USAGE = "asyncrl launch --config FILE [--dry-run] [--address ADDRESS] [--section.key=value ...]"
LAUNCH_HELP = """\
Run a job: check everything, start its processes on Ray, train, save the model.
Every setting of the file can be changed on the command line:

  asyncrl launch --config run.toml --learners.lr=1e-5 --mode=sync --data.eval=held_out.jsonl
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0 done, 2 the user has something to mend, 130 interrupted.

    Errors of asyncrl are printed as their message alone; any other exception is a bug and keeps its traceback.
    """
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except AsyncRLError as error:
        for problem in error.problems if isinstance(error, ConfigError) else [str(error)]:
            print(f"error: {problem}", file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:  # `asyncrl buffer tail | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what is still buffered goes nowhere, silently
        return OK
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(argv: list[str]) -> int:
    arguments, overrides = _parser().parse_known_args(argv)
    if arguments.command is None:
        _parser().print_help()
        return OK
    if arguments.command == "buffer":
        if arguments.verb == "replay":
            _refuse_misspelt_flags(overrides)
        return buffer_cli.run(arguments, overrides)
    return _launch(arguments, overrides)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl",
        description="Asynchronous off-policy reinforcement learning for language models.",
        epilog="`asyncrl launch --help` lists every setting.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"asyncrl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    launch = commands.add_parser("launch", help="run a job", usage=LAUNCH_USAGE, add_help=False, allow_abbrev=False)
    launch.add_argument("--config", metavar="FILE", required=True)
    launch.add_argument("--address", metavar="ADDRESS")
    launch.add_argument("--dry-run", action="store_true")
    launch.add_argument("-h", "--help", action=_LaunchHelp)
    buffer_cli.add_commands(commands)
    return parser


class _LaunchHelp(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0)

    def __call__(self, *_: object) -> NoReturn:
        from asyncrl.config_help import config_help

        options = {
            "--config FILE": "TOML file with the settings of the job",
            "--dry-run": "check everything, print all settings in force and the placement of processes, start nothing",
            "--address ADDRESS": "Ray cluster to run on (auto, HOST:PORT, ray://HOST:PORT); omitted: the one that "
            "`ray start` runs on this machine, or a new one for the time of the run; local: always a new one",
        }
        print(f"usage: {LAUNCH_USAGE}\n\n{LAUNCH_HELP}\noptions:")
        for option, meaning in options.items():
            print(f"  {option}\n      {meaning}")
        print(f"\nsettings:\n\n{config_help()}")
        raise SystemExit(OK)


def _launch(arguments: argparse.Namespace, overrides: list[str]) -> int:
    _refuse_misspelt_flags(overrides)
    from asyncrl.config_load import load_config, resolved_toml
    from asyncrl.preflight import preflight

    prepared = preflight(load_config(arguments.config, overrides))
    from asyncrl.launch import launch, placement_plan

    if not arguments.dry_run:
        return launch(prepared, address=arguments.address)
    plan = placement_plan(prepared.config, arguments.address)
    print(resolved_toml(prepared.config))
    print("\n".join(f"# {line}".rstrip() for line in plan.splitlines()))
    return OK


def _refuse_misspelt_flags(overrides: Sequence[str]) -> None:
    """`--dryrun` must not be taken for a setting that lacks its value."""
    for argument in overrides:
        name = argument.removeprefix("--").partition("=")[0]
        meant = nearest(name, FLAGS) if argument.startswith("--") and len(name) > 3 and "." not in name else None
        if meant is not None:
            raise ConfigError(f"(command line): unknown option --{name}; did you mean --{meant}?")


if __name__ == "__main__":
    sys.exit(main())
