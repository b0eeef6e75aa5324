"""TOML file + command-line overrides -> a checked configuration, or one error that lists every problem.

Checked here: what the text alone tells (keys, types, ranges, sizes that must divide). What needs the disk is in
`preflight`. A problem reads "PLACE: [section] what is wrong; the value; the fix", where PLACE is file:line or
"(command line)".
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from asyncrl.config import JOBS, JobConfig, RLConfig, Section, SFTConfig
from asyncrl.config_help import accepts, choices, section_of
from asyncrl.errors import ConfigError
from asyncrl.suggest import nearest
from asyncrl.toml_lines import KeyPath, Places, key_lines
from asyncrl.unknown_keys import UnknownKeys, lookup


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RLConfig | SFTConfig:
    """Read a configuration.

    Args:
        overrides: settings as on the command line: "--section.key=value", or "--section.key" followed by "value".
            A value is TOML (1e-5, true, [0.9, 0.95], "text"); what is not TOML is text.

    Raises:
        ConfigError: with all problems.
    """
    text, document = _read(Path(path))
    places = Places(str(path), key_lines(text))
    problems = _apply_overrides(document, overrides, places)
    model = _job_model(document, places, problems)
    config = _build(model, document, places, problems) if model is not None else None
    if problems or config is None:
        raise ConfigError(sorted(problems, key=places.order))
    return config


def resolved_toml(config: JobConfig) -> str:
    """TOML text of every setting in force; `load_config` reads it back to an equal configuration."""
    values = config.model_dump(exclude_none=True)
    return tomli_w.dumps({"job": values.pop("job"), **values})


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file; looked at {path.absolute()}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); a configuration is a TOML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}:{_error_line(str(error), text)}: not valid TOML: {error}") from None


def _error_line(message: str, text: str) -> int:
    found = re.search(r"at line (\d+)", message)
    return int(found[1]) if found else max(1, len(text.splitlines()))


def _apply_overrides(document: dict[str, Any], overrides: Sequence[str], places: Places) -> list[str]:
    """Write the overrides into the document. Returns the problems of their syntax."""
    problems = []
    rest = list(overrides)
    while rest:
        argument = rest.pop(0)
        name, equals, raw = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not name:
            problems.append(f"(command line): unexpected {argument!r}; a setting is written --section.key=value")
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                problems.append(f"(command line): --{name} has no value; write --{name}=VALUE")
                continue
            raw = rest.pop(0)
        path = tuple(name.split("."))
        table = document
        for depth, part in enumerate(path[:-1], start=1):
            if not isinstance(table.setdefault(part, {}), dict):
                table[part] = {}
                places.overridden[path[:depth]] = raw
            table = table[part]
        table[path[-1]] = _parse(raw)
        places.overridden[path] = raw
    return problems


def _parse(raw: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    return parsed["value"] if len(parsed) == 1 else raw


def _job_model(document: dict[str, Any], places: Places, problems: list[str]) -> type[JobConfig] | None:
    """The model that `job` names; None and one more problem if it names none."""
    job = document.get("job")
    if isinstance(job, str) and job in JOBS:
        return JOBS[job]
    listing = " or ".join(f'job = "{name}" ({_first_line(model)})' for name, model in JOBS.items())
    if "job" not in document:
        problems.append(f"{places.file}: job is missing; add {listing} at the top")
    else:
        hint = nearest(job, JOBS) if isinstance(job, str) else None
        meant = f'; did you mean "{hint}"?' if hint else ""
        names = ", ".join(f'"{name}"' for name in JOBS)
        problems.append(f"{places.of(('job',))}: job must be one of {names}; got {_show(job)}{meant}")
    return None


def _first_line(model: type[JobConfig]) -> str:
    return (model.__doc__ or "").strip().splitlines()[0].rstrip(".")


def _build(
    model: type[JobConfig], document: dict[str, Any], places: Places, problems: list[str]
) -> RLConfig | SFTConfig | None:
    """Validate; all problems are added to `problems`."""
    unknown = UnknownKeys(model, places)
    clean = unknown.strip(document, model, ())
    problems += unknown.problems
    suspects = unknown.meant
    try:
        config = model.model_validate(clean, strict=True)
    except ValidationError as error:
        fields = [e for e in error.errors(include_url=False) if e["loc"]]
        bad = {path for e in fields if (path := _field_path(model, e["loc"]))}
        problems += _field_problems(model, fields, clean, places, suspects)
        # A rule over several keys says something only if none of the keys that it names has a problem of its own.
        suspects = suspects | {path[-1] for path in bad}
        problems += _rule_problems(error if not fields else _retry_without(model, clean, bad), places, suspects)
        return None
    assert isinstance(config, RLConfig | SFTConfig)
    return config


def _field_path(model: type[Section], location: tuple[int | str, ...]) -> KeyPath:
    """The longest start of a pydantic location that names a field."""
    path = tuple(str(part) for part in location)
    while path and lookup(model, path) is None:
        path = path[:-1]
    return path


def _field_problems(
    model: type[JobConfig], errors: Sequence[Any], document: dict[str, Any], places: Places, meant: set[str]
) -> list[str]:
    problems: dict[KeyPath, str] = {}  # one for each key, also if two elements of its list are wrong
    for error in errors:
        path = _field_path(model, error["loc"])
        field_info = lookup(model, path)
        if field_info is None or path in problems or (error["type"] == "missing" and path[-1] in meant):
            continue
        problems[path] = f"{places.of(path)}: {_what(path, field_info, document)}"
    return list(problems.values())


def _what(path: KeyPath, field_info: FieldInfo, document: dict[str, Any]) -> str:
    section = section_of(field_info)
    value: Any = document
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    if section is not None and value is None:
        needed = [f"{n} ({_sentence(f)})" for n, f in section.model_fields.items() if f.is_required()]
        return f"section [{path[-1]}] is missing; it needs {', '.join(needed)}"
    if section is not None:
        return f"[{path[-1]}] must be a section of keys; got {_show(value)}"
    label = f"[{path[0]}] {path[1]}" if len(path) == 2 else path[0]
    if value is None:
        return f"{label} is missing; it must be {accepts(field_info)} ({_sentence(field_info)})"
    hint = nearest(value, map(str, choices(field_info))) if isinstance(value, str) else None
    meant = f'; did you mean "{hint}"?' if hint else ""
    return f"{label} must be {accepts(field_info)}; got {_show(value)}{meant}"


def _sentence(field_info: FieldInfo) -> str:
    return " ".join((field_info.description or "").split()).split(". ")[0].rstrip(".")


def _show(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError:
        text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _retry_without(model: type[JobConfig], document: dict[str, Any], bad: set[KeyPath]) -> ValidationError | None:
    """The error of the same document without its bad keys, so that rules over the others are checked too."""
    reduced = {key: dict(value) if isinstance(value, dict) else value for key, value in document.items()}
    for path in bad:
        table = reduced
        for part in path[:-1]:
            table = table.get(part, {})
        table.pop(path[-1], None)
    try:
        model.model_validate(reduced, strict=True)
    except ValidationError as error:
        return error
    return None


def _rule_problems(error: ValidationError | None, places: Places, suspects: set[str]) -> list[str]:
    """Broken rules over several keys, each at the place of a key that it names: an overridden one, else the first."""
    problems = []
    for item in error.errors(include_url=False) if error is not None else []:
        if item["loc"]:
            continue
        for line in item["msg"].removeprefix("Value error, ").splitlines():
            if suspects & set(re.findall(r"\w+", line)):
                continue
            named = [(s, k) for s, k in re.findall(r"\[(\w+)\] (\w+)", line)] + [(w,) for w in re.findall(r"\w+", line)]
            written = [path for path in named if path in places.overridden or path in places.lines]
            written.sort(key=lambda path: path not in places.overridden)  # the newest change is the likely cause
            problems.append(f"{places.of(written[0]) if written else places.file}: {line}")
    return problems
