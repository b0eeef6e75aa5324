"""Keys that are not settings: finds them, takes them out, and says what was probably meant."""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo

from asyncrl.config import JOBS, JobConfig, Section
from asyncrl.config_help import is_text, section_of
from asyncrl.suggest import did_you_mean, nearest
from asyncrl.toml_lines import KeyPath, Places

# Names that other trainers use for the same thing, where spelling alone does not lead to ours.
_KNOWN_AS = {
    "batch_size": "groups_per_step",
    "num_generations": "group_size",
    "max_grad_norm": "grad_clip",
    "gradient_checkpointing": "activation_checkpointing",
    "lr_scheduler_type": "lr_schedule",
    "max_completion_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "max_steps": "steps",
    "num_steps": "steps",
    "epsilon": "clip_low",
    "epsilon_high": "clip_high",
    "tensor_parallel_size": "tensor_parallel",
    "model_name_or_path": "path",
}


class UnknownKeys:
    """Takes unknown keys out of a document, noting each as a problem with the key that was probably meant."""

    def __init__(self, model: type[JobConfig], places: Places) -> None:
        self._model = model
        self._places = places
        self.problems: list[str] = []
        self.meant: set[str] = set()  # names of keys and sections that unknown ones were probably meant to be

    def strip(self, table: dict[str, Any], model: type[Section], path: KeyPath) -> dict[str, Any]:
        """The part of `table` that `model` knows, with lists as tuples and text where text is wanted."""
        clean: dict[str, Any] = {}
        for key, value in table.items():
            where = (*path, key)
            field_info = model.model_fields.get(key)
            if field_info is None:
                self._unknown(key, value, model, path)
                continue
            section = section_of(field_info)
            if section is not None and isinstance(value, dict):
                clean[key] = self.strip(value, section, where)
            elif is_text(field_info) and where in self._places.overridden and not isinstance(value, str):
                clean[key] = self._places.overridden[where]
            else:
                clean[key] = tuple(value) if isinstance(value, list) else value
        return clean

    def _unknown(self, key: str, value: Any, model: type[Section], path: KeyPath) -> None:
        is_section = isinstance(value, dict) and not path
        section = f"[{path[0]}] " if path else ""
        what = f"unknown section [{key}]" if is_section else f"{section}unknown key {key!r}"
        self.problems.append(f"{self._places.of((*path, key))}: {what}{self._hint(key, model, path, is_section)}")

    def _hint(self, key: str, model: type[Section], path: KeyPath, is_section: bool) -> str:
        here = [n for n, f in model.model_fields.items() if (section_of(f) is not None) == is_section or path]
        for job, other in JOBS.items():
            if other is not self._model and lookup(other, (*path, key)):
                return f'; it belongs to job = "{job}", and this is job = "{self._job_name()}"'
        longer = [name for name in here if name.startswith(f"{key}_")]
        alias = _KNOWN_AS.get(key) or (longer[0] if len(longer) == 1 else None)
        elsewhere = {} if is_section else _owners(self._model)
        exact = [name for name, known in ((alias, here), (key, elsewhere), (alias, elsewhere)) if name in known]
        found = exact[0] if exact else nearest(key, here) or nearest(key, elsewhere)
        if found is None:
            return did_you_mean(key, here)
        self.meant.add(found)
        if found in here:
            return f"; did you mean {f'[{found}]' if is_section else repr(found)}?"
        if elsewhere[found]:
            return f"; did you mean {found!r} of [{elsewhere[found]}]?"
        return f"; did you mean the top-level key {found!r}? It goes above the first [section]"

    def _job_name(self) -> str:
        return next(job for job, model in JOBS.items() if model is self._model)


def _owners(model: type[JobConfig]) -> dict[str, str]:
    """Every key -> the first section that has it; "" stands for the top level."""
    owners: dict[str, str] = {}
    for name, field_info in model.model_fields.items():
        section = section_of(field_info)
        for key in (name,) if section is None else section.model_fields:
            owners.setdefault(key, "" if section is None else name)
    return owners


def lookup(model: type[Section], path: KeyPath) -> FieldInfo | None:
    """The field at a path of names, None if there is none."""
    found: FieldInfo | None = None
    current: type[Section] | None = model
    for part in path:
        found = current.model_fields.get(part) if current is not None else None
        if found is None:
            return None
        current = section_of(found)
    return found
