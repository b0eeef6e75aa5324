"""Finds the name that a misspelt one was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `name` most likely stands for, or None.

    Knows typing errors ("learing_rate"), word order and letter case, and abbreviations ("learning_rate",
    "lrate" -> "lr").
    """
    names = list(candidates)
    by_form = {form: name for name in reversed(names) for form in (_plain(name), _sorted_words(name))}
    for form in (_plain(name), _sorted_words(name)):
        if form in by_form:
            return by_form[form]
    close = difflib.get_close_matches(_plain(name), by_form, n=1, cutoff=0.6)
    if close:
        return by_form[close[0]]
    initials = [n for n in names if n == _initials(name) or name == _initials(n)]
    beginnings = sorted((n for n in names if len(n) > 1 and name.startswith(n)), key=len, reverse=True)
    return next(iter([*initials, *beginnings]), None)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """ "; did you mean 'x'?" or, where nothing is near, the list of what exists."""
    candidates = list(candidates)
    found = nearest(name, candidates)
    if found is not None:
        return f"; did you mean {found!r}?"
    return f"; there is {', '.join(candidates)}" if candidates else ""


def _words(name: str) -> list[str]:
    return [word for word in name.lower().replace("-", "_").split("_") if word]


def _plain(name: str) -> str:
    return "".join(_words(name))


def _sorted_words(name: str) -> str:
    return "_".join(sorted(_words(name)))


def _initials(name: str) -> str:
    words = _words(name)
    return "".join(word[0] for word in words) if len(words) > 1 else ""
