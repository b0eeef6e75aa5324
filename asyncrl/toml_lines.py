"""Where each setting is written: tomllib gives the values of a document, this gives the lines."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field

KeyPath = tuple[str, ...]

_BARE_END = ",]}#\n"


def key_lines(text: str) -> dict[KeyPath, int]:
    """Map key paths to 1-based lines, e.g. {("learners",): 3, ("learners", "lr"): 4}.

    `text` must be valid TOML. Tables, dotted keys and inline tables are covered; what is inside an array (also an array
    of tables) has no entry, because a path of names does not say which element is meant.
    """
    return _Scanner(text).document()


@dataclass(slots=True)
class Places:
    """Where settings were written: in which line of the file, or on the command line (path -> text of the value)."""

    file: str
    lines: dict[KeyPath, int]
    overridden: dict[KeyPath, str] = field(default_factory=dict)

    def of(self, path: KeyPath) -> str:
        """Of a key; of the section it should be in, if it is written nowhere; else the file."""
        if path not in self.lines and any(key[: len(path)] == path for key in self.overridden):
            return "(command line)"
        for end in range(len(path), 0, -1):
            if path[:end] in self.overridden:
                return "(command line)"
            if path[:end] in self.lines:
                return f"{self.file}:{self.lines[path[:end]]}"
        return self.file

    def order(self, problem: str) -> int:
        """Sort key of a problem: its line; the command line comes last."""
        found = re.match(re.escape(self.file) + r":(\d+):", problem)
        return int(found[1]) if found else (10**9 if problem.startswith("(command line)") else 0)


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n")
        self._at = 0
        self._lines: dict[KeyPath, int] = {}
        self._array_tables: list[KeyPath] = []

    def document(self) -> dict[KeyPath, int]:
        table: KeyPath | None = ()
        while self._skip_blank():
            if self._text[self._at] == "[":
                table = self._header()
            else:
                self._pair(table)
        return self._lines

    def _header(self) -> KeyPath | None:
        line, is_array = self._line(), self._text.startswith("[[", self._at)
        self._at += 2 if is_array else 1
        path = self._key()
        self._at += 2 if is_array else 1
        if is_array:
            self._array_tables.append(path)
        if any(path[: len(parent)] == parent for parent in self._array_tables):
            return None
        self._record(path, line)
        return path

    def _pair(self, table: KeyPath | None) -> None:
        line = self._line()
        key = self._key()
        self._at += 1  # the "="
        path = None if table is None else table + key
        if path is not None:
            self._record(path, line)
        self._value(path)

    def _record(self, path: KeyPath, line: int) -> None:
        for end in range(1, len(path) + 1):
            self._lines.setdefault(path[:end], line)

    def _key(self) -> KeyPath:
        """A possibly dotted, possibly quoted key; leaves the position on the character after it."""
        parts = []
        while True:
            self._skip_space()
            start = self._at
            if self._text[start] in "\"'":
                self._string()
                parts.append(tomllib.loads(f"v = {self._text[start : self._at]}")["v"])
            else:
                while self._text[self._at] not in " \t.=]":
                    self._at += 1
                parts.append(self._text[start : self._at])
            self._skip_space()
            if self._text[self._at] != ".":
                return tuple(parts)
            self._at += 1

    def _value(self, path: KeyPath | None) -> None:
        self._skip_space()
        first = self._text[self._at]
        if first in "\"'":
            self._string()
        elif first == "[":
            self._items("]", None)
        elif first == "{":
            self._items("}", path)
        else:
            while self._at < len(self._text) and self._text[self._at] not in _BARE_END:
                self._at += 1

    def _items(self, closing: str, path: KeyPath | None) -> None:
        """The inside of an array or of an inline table."""
        self._at += 1
        while True:
            self._skip_blank()
            if self._text[self._at] == closing:
                self._at += 1
                return
            if self._text[self._at] == ",":
                self._at += 1
            elif closing == "}":
                self._pair(path)
            else:
                self._value(None)

    def _string(self) -> None:
        quote = self._text[self._at]
        delimiter = quote * 3 if self._text.startswith(quote * 3, self._at) else quote
        self._at += len(delimiter)
        while not self._text.startswith(delimiter, self._at):
            self._at += 2 if quote == '"' and self._text[self._at] == "\\" else 1
        self._at += len(delimiter)
        while len(delimiter) == 3 and self._text.startswith(quote, self._at):  # """a"""" ends with a quote of its own
            self._at += 1

    def _skip_space(self) -> None:
        while self._text[self._at] in " \t":
            self._at += 1

    def _skip_blank(self) -> bool:
        """Skip white space, line ends and comments. False at the end of the document."""
        while self._at < len(self._text):
            if self._text[self._at] == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif self._text[self._at] in " \t\n":
                self._at += 1
            else:
                return True
        return False

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1
