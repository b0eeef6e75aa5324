"""JSONL files -> prompts and demonstrations as token ids. What generation sees and what SFT trains on are made here,
by the same code, so that they agree to the token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config import DemonstrationsConfig, PromptsConfig
from asyncrl.errors import DataError
from asyncrl.suggest import nearest
from asyncrl.types import Prompt

Tokenizer = Any  # a transformers tokenizer; importing the type would import transformers


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a JSONL file.

    Attributes:
        place: file name and line, "prompts.jsonl:17"; also the row's identity.
        where: the same with the path as the user wrote it, for messages.
    """

    place: str
    where: str
    columns: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt and the answer to learn.

    Attributes:
        tokens: prompt, response and end-of-sequence token.
        prompt_length: tokens of the prompt, which carry no loss.
    """

    tokens: list[int]
    prompt_length: int
    row_id: str


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a model folder. Never looks anywhere else than in the folder.

    Raises:
        DataError: there is none, or it cannot be loaded.
    """
    folder = Path(path)
    settings = _read_json(folder / "tokenizer_config.json")
    plain = settings.get("tokenizer_class") == "TokenizersBackend" and "auto_map" not in settings
    try:
        if plain and (folder / "tokenizer.json").is_file():
            # What AutoTokenizer would return, without its import (which brings torch and takes ten times as long).
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code, local_files_only=True)
        if not len(tokenizer):  # transformers makes an empty one from config.json alone
            raise ValueError("there is none")
        return tokenizer
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"[model] path: the tokenizer in {path} cannot be loaded: {lines[0]}; the folder needs what "
            f"tokenizer.save_pretrained writes (tokenizer.json, tokenizer_config.json)"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def load_prompts(path: str | Path, *, config: PromptsConfig, tokenizer: Tokenizer) -> list[Prompt]:
    """All prompts of a JSONL file, tokenized.

    Raises:
        DataError: with file:line.
    """
    rows = read_rows(path, columns={"prompt_column": config.prompt_column})
    texts, tokens = _encode_prompts(rows, config=config, tokenizer=tokenizer)
    return [
        Prompt(prompt_id=row.place, tokens=ids, text=text, row=row.columns)
        for row, text, ids in zip(rows, texts, tokens, strict=True)
    ]


def load_demonstrations(path: str | Path, *, config: DemonstrationsConfig, tokenizer: Tokenizer) -> list[Demonstration]:
    """All demonstrations of a JSONL file, tokenized: the prompt exactly as generation sees it, then the response.

    Raises:
        DataError: with file:line, or if the tokenizer has no end-of-sequence token.
    """
    rows = read_rows(path, columns={"prompt_column": config.prompt_column, "response_column": config.response_column})
    if tokenizer.eos_token_id is None:
        raise DataError(
            "[model] path: the tokenizer has no eos_token, so that a model could not learn where a response ends; "
            "set one in tokenizer_config.json"
        )
    for row in rows:
        response = row.columns[config.response_column]
        if not isinstance(response, str) or not response:
            found = "empty" if response == "" else f"{_kind(response)}, not text"
            raise DataError(f"{row.where}: the response (column {config.response_column!r}) is {found}")
    _, prompts = _encode_prompts(rows, config=config, tokenizer=tokenizer)
    responses = _encode([row.columns[config.response_column] for row in rows], tokenizer)
    return [
        Demonstration(tokens=[*prompt, *response, tokenizer.eos_token_id], prompt_length=len(prompt), row_id=row.place)
        for row, prompt, response in zip(rows, prompts, responses, strict=True)
    ]


def read_rows(path: str | Path, *, columns: dict[str, str]) -> list[Row]:
    """The rows of a JSONL file, blank lines aside.

    Args:
        columns: columns that every row must have, by the name of the setting that asks for them.

    Raises:
        DataError: for the first row that is wrong, with file:line.
    """
    path = Path(path).expanduser()
    rows = []
    for number, line in enumerate(_read_lines(path), start=1):
        if not line.strip():
            continue
        row = Row(f"{path.name}:{number}", f"{path}:{number}", _parse(line, f"{path}:{number}"))
        for setting, column in columns.items():
            if column not in row.columns:
                raise _missing_column(row, setting, column)
        rows.append(row)
    if not rows:
        raise DataError(f"{path}: the file has no rows; it must have one JSON object per line")
    return rows


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode("utf-8-sig").split("\n")
    except FileNotFoundError:
        folder = path.absolute().parent
        close = nearest(path.name, sorted(os.listdir(folder))) if folder.is_dir() else None
        hint = f"; did you mean {close!r}?" if close else "" if folder.is_dir() else " (its folder does not exist)"
        raise DataError(f"{path}: no such file; looked at {path.absolute()}{hint}") from None
    except IsADirectoryError:
        raise DataError(f"{path}: is a folder; give the path of a JSONL file") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8 text; save the file as UTF-8") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        shown = line.strip() if len(line.strip()) <= 60 else line.strip()[:57] + "..."
        raise DataError(f"{where}: not valid JSON: {error.msg} at column {error.colno}: {shown}") from None
    if not isinstance(value, dict):
        raise DataError(f'{where}: is {_kind(value)}; every line must be an object such as {{"prompt": "..."}}')
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{where}: half of a surrogate pair (an escape \\ud800 to \\udfff) is not a character"
        ) from None
    return value


def _missing_column(row: Row, setting: str, column: str) -> DataError:
    have = ", ".join(map(repr, row.columns)) or "none"
    close = nearest(column, row.columns)
    fix = f'set [data] {setting} = "{close}"' if close else f"set [data] {setting} to the one that is meant"
    return DataError(f"{row.where}: no column {column!r}; its columns are {have}; {fix}")


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "null")


def _encode_prompts(
    rows: Sequence[Row], *, config: PromptsConfig | DemonstrationsConfig, tokenizer: Tokenizer
) -> tuple[list[str], list[list[int]]]:
    """Text and token ids of every row's prompt."""
    use_template = _uses_template(config, tokenizer)
    texts = [_render(row, config.prompt_column, tokenizer, use_template=use_template) for row in rows]
    # A chat template writes the beginning-of-sequence token itself.
    start = [] if use_template else _start_tokens(tokenizer)
    tokens = [[*start, *ids] for ids in _encode(texts, tokenizer)]
    for row, ids in zip(rows, tokens, strict=True):
        if not ids:
            raise DataError(f"{row.where}: the prompt (column {config.prompt_column!r}) has no tokens")
    return texts, tokens


def _uses_template(config: PromptsConfig | DemonstrationsConfig, tokenizer: Tokenizer) -> bool:
    has_template = bool(tokenizer.chat_template)
    if config.apply_chat_template and not has_template:
        raise DataError(
            "[data] apply_chat_template = true, but the model's tokenizer has no chat template; "
            "set it to false, or use a model with one"
        )
    return has_template if config.apply_chat_template is None else config.apply_chat_template


def _render(row: Row, column: str, tokenizer: Tokenizer, *, use_template: bool) -> str:
    prompt = row.columns[column]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{row.where}: the prompt (column {column!r}) is empty")
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = _check_messages(prompt, row, column)
        if not use_template:
            raise DataError(
                f"{row.where}: the prompt (column {column!r}) is a list of messages, which needs a chat template, and "
                f"[data] apply_chat_template is false or the tokenizer has none; write the prompts as strings"
            )
    if not use_template:
        return prompt
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        raise DataError(f"{row.where}: the chat template refuses these messages: {error}") from error


def _check_messages(prompt: Any, row: Row, column: str) -> list[dict[str, Any]]:
    if not isinstance(prompt, list):
        raise DataError(
            f"{row.where}: the prompt (column {column!r}) is {_kind(prompt)}; it must be a string or a list of "
            f'messages such as {{"role": "user", "content": "..."}}'
        )
    if not prompt:
        raise DataError(f"{row.where}: the prompt (column {column!r}) is empty")
    for i, message in enumerate(prompt):
        if not (isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))):
            raise DataError(
                f"{row.where}: message {i} of the prompt must be an object with the strings role and content"
            )
    return prompt


def _start_tokens(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before a text: its beginning-of-sequence token or nothing. Never an end token."""
    ids = tokenizer("")["input_ids"]
    return ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []


def _encode(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    return tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]
