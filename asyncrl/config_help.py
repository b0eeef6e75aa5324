"""Settings in words: what a key accepts, and the list of all keys that `asyncrl launch --help` prints."""

from __future__ import annotations

import json
import textwrap
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from asyncrl.config import JOBS, JobConfig, Section

_BOUNDS = {Gt: ("gt", ">"), Ge: ("ge", ">="), Lt: ("lt", "<"), Le: ("le", "<=")}


def section_of(field: FieldInfo) -> type[Section] | None:
    """The model of a field that is a section, None for a field that is a value."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def accepts(field: FieldInfo) -> str:
    """What a value may be, e.g. "an integer > 0" or "one of "async", "sync""."""
    return _describe(field.annotation, field.metadata)


def choices(field: FieldInfo) -> tuple[Any, ...]:
    """The values of a field that is a choice, else ()."""
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()


def is_text(field: FieldInfo) -> bool:
    """Whether any string may be written there."""
    return field.annotation is str or str in get_args(field.annotation)


def _describe(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe(arguments[0], [*annotation.__metadata__])
    if origin in (Union, types.UnionType):
        return _describe(next(a for a in arguments if a is not type(None)), metadata)
    if origin is Literal:
        words = ", ".join(json.dumps(a) for a in arguments)
        return words if len(arguments) == 1 else f"one of {words}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each {_describe(arguments[0], metadata)}"
    if annotation is bool:
        return "true or false"
    if annotation is str:
        return (
            "letters, digits and any of _.- after a letter or digit"
            if any(getattr(m, "pattern", None) for m in metadata)
            else "a string"
        )
    bounds = " and ".join(_bounds(metadata))
    return f"{'an integer' if annotation is int else 'a number'} {bounds}".rstrip()


def _bounds(metadata: list[Any]) -> Iterator[str]:
    for item in metadata:
        for constraint in item.metadata if isinstance(item, FieldInfo) else [item]:
            if type(constraint) in _BOUNDS:
                attribute, symbol = _BOUNDS[type(constraint)]
                yield f"{symbol} {getattr(constraint, attribute):g}"


def config_help() -> str:
    """Every key of every job, by section, with type, default and meaning."""
    shared = set(JobConfig.model_fields)
    blocks = [_heading("every job"), *_keys(JobConfig, set(JobConfig.model_fields))]
    for job, model in JOBS.items():
        blocks += ["", _heading(f'job = "{job}": {(model.__doc__ or "").strip()}')]
        blocks += _keys(model, set(model.model_fields) - shared - {"job"})
    return "\n".join(blocks)


def _heading(text: str) -> str:
    return f"{text}\n{'-' * len(text)}"


def _keys(model: type[Section], names: set[str]) -> Iterator[str]:
    fields = {name: field for name, field in model.model_fields.items() if name in names}
    for name, field in fields.items():
        if section_of(field) is None:
            yield _entry(name, field)
    for name, field in fields.items():
        section = section_of(field)
        if section is not None:
            yield f"\n[{name}]"
            yield from (_entry(key, value) for key, value in section.model_fields.items())


def _entry(name: str, field: FieldInfo) -> str:
    if field.is_required():
        default = "required"
    elif field.default is None:
        default = "may be omitted"
    else:
        default = f"default {_toml(field.default)}"
    words = textwrap.fill(
        " ".join((field.description or "").split()), width=110, initial_indent=" " * 6, subsequent_indent=" " * 6
    )
    return f"  {name}  ({accepts(field)}; {default})\n{words}"


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)
