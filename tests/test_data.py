"""Reading and tokenizing data files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import DemonstrationsConfig, PromptsConfig
from asyncrl.data import load_demonstrations, load_prompts, load_tokenizer
from asyncrl.errors import DataError

# A message is written "-CONTENT+"; the assistant's turn begins with a second "-".
TEMPLATE = "{% for m in messages %}-{{ m.content }}+{% endfor %}{% if add_generation_prompt %}-{% endif %}"
REFUSING = "{{ raise_exception('roles must alternate') }}"


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Any:
    return load_tokenizer(tiny_model)


@pytest.fixture
def chat(tiny_model: Path) -> Any:
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def prompts(path: Path, tokenizer: Any, **settings: Any) -> Any:
    return load_prompts(path, config=PromptsConfig(train=str(path), **settings), tokenizer=tokenizer)


def demonstrations(path: Path, tokenizer: Any, **settings: Any) -> Any:
    return load_demonstrations(path, config=DemonstrationsConfig(train=str(path), **settings), tokenizer=tokenizer)


def ids(text: str) -> list[int]:
    return [3 + "0123456789=+- ".index(character) for character in text]


def test_string_prompts(tmp_path: Path, plain: Any) -> None:
    path = write(tmp_path, {"prompt": "12=", "answer": "12"}, "", {"prompt": "0=", "answer": "0", "level": 2})
    first, second = prompts(path, plain)
    assert (first.prompt_id, first.text, first.tokens) == ("rows.jsonl:1", "12=", ids("12="))
    assert (second.prompt_id, second.tokens, second.row["level"]) == ("rows.jsonl:3", ids("0="), 2)


def test_chat_template_is_used_when_there_is_one(tmp_path: Path, chat: Any) -> None:
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]
    path = write(tmp_path, {"prompt": "12="}, {"prompt": messages})
    as_user, as_messages = prompts(path, chat)
    assert (as_user.text, as_user.tokens) == ("-12=+-", ids("-12=+-"))
    assert (as_messages.text, as_messages.row["prompt"]) == ("-1+-2+-", messages)
    (off,) = prompts(write(tmp_path, {"prompt": "12="}), chat, apply_chat_template=False)
    assert off.text == "12="


def test_beginning_of_sequence_token_only_without_template(tmp_path: Path, tiny_model: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(tiny_model)
    tokenizer.bos_token = "<pad>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A <eos>", special_tokens=[("<pad>", 0), ("<eos>", 1)]
    )
    path = write(tmp_path, {"prompt": "1=", "response": "1"})
    assert prompts(path, tokenizer)[0].tokens == [0, *ids("1=")]
    assert demonstrations(path, tokenizer)[0].tokens == [0, *ids("1=1"), 1]
    tokenizer.chat_template = TEMPLATE
    assert prompts(path, tokenizer)[0].tokens == ids("-1=+-")


@pytest.mark.parametrize("with_template", [False, True])
def test_demonstrations_begin_with_what_generation_sees(
    tmp_path: Path, plain: Any, chat: Any, with_template: bool
) -> None:
    tokenizer = chat if with_template else plain
    path = write(tmp_path, {"prompt": "21=", "response": "12"}, {"prompt": "9=", "response": "9"})
    for prompt, demonstration in zip(prompts(path, tokenizer), demonstrations(path, tokenizer), strict=True):
        assert demonstration.tokens[: demonstration.prompt_length] == prompt.tokens
        assert demonstration.row_id == prompt.prompt_id
    assert demonstration.tokens[demonstration.prompt_length :] == [*ids("9"), tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (
            ['{"prompt": "1="}', '{"prompt": 1='],
            ":2: not valid JSON: Expecting ',' delimiter at column 13: {\"prompt\": 1=",
        ),
        (['{"prompt": "1\\ud800="}'], ":1: half of a surrogate pair"),
        (['{"prompt": "1="}', "", "[1]"], ':3: is a list; every line must be an object such as {"prompt": "..."}'),
        (
            [{"prompt": "1="}, {"promt": "2=", "answer": "2"}],
            ":2: no column 'prompt'; its columns are 'promt', 'answer'; set [data] prompt_column = \"promt\"",
        ),
        (
            [{"q": "2="}],
            ":1: no column 'prompt'; its columns are 'q'; set [data] prompt_column to the one that is meant",
        ),
        ([], ": the file has no rows; it must have one JSON object per line"),
        ([{"prompt": "1="}, {"prompt": " "}], ":2: the prompt (column 'prompt') is empty"),
        ([{"prompt": []}], ":1: the prompt (column 'prompt') is empty"),
        ([{"prompt": 3}], ":1: the prompt (column 'prompt') is a number; it must be a string or a list of messages"),
        ([{"prompt": None}], ":1: the prompt (column 'prompt') is null"),
        (
            [{"prompt": [{"role": "user"}]}],
            ":1: message 0 of the prompt must be an object with the strings role and content",
        ),
        (
            [{"prompt": [{"role": "user", "content": "1"}]}],
            ":1: the prompt (column 'prompt') is a list of messages, which",
        ),
    ],
)
def test_wrong_prompt_files(tmp_path: Path, plain: Any, rows: list[Any], expected: str) -> None:
    path = write(tmp_path, *rows)
    with pytest.raises(DataError) as caught:
        prompts(path, plain)
    assert str(caught.value).startswith(f"{path}{expected}")


def test_wrong_demonstrations(tmp_path: Path, plain: Any, tiny_model: Path) -> None:
    path = write(tmp_path, {"prompt": "1=", "respons": "1"})
    with pytest.raises(DataError, match=r":1: no column 'response'.*set \[data\] response_column = \"respons\""):
        demonstrations(path, plain)
    with pytest.raises(DataError, match=r":1: the response \(column 'response'\) is empty"):
        demonstrations(write(tmp_path, {"prompt": "1=", "response": ""}), plain)
    with pytest.raises(DataError, match=r":1: the response .* is a number, not text"):
        demonstrations(write(tmp_path, {"prompt": "1=", "response": 1}), plain)
    endless = load_tokenizer(tiny_model)
    endless.eos_token = None
    with pytest.raises(DataError, match="has no eos_token"):
        demonstrations(write(tmp_path, {"prompt": "1=", "response": "1"}), endless)


def test_files_that_cannot_be_read(tmp_path: Path, plain: Any) -> None:
    write(tmp_path, {"prompt": "1="})
    with pytest.raises(DataError) as caught:
        prompts(tmp_path / "row.jsonl", plain)
    message = str(caught.value)
    assert f"no such file; looked at {tmp_path / 'row.jsonl'}; did you mean 'rows.jsonl'?" in message
    with pytest.raises(DataError, match="its folder does not exist"):
        prompts(tmp_path / "no" / "rows.jsonl", plain)
    with pytest.raises(DataError, match="is a folder"):
        prompts(tmp_path, plain)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "1="}\n{"prompt": "\xe9"}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl:2: not UTF-8 text"):
        prompts(tmp_path / "latin.jsonl", plain)


def test_chat_template_problems(tmp_path: Path, plain: Any, chat: Any) -> None:
    path = write(tmp_path, {"prompt": "1="})
    with pytest.raises(DataError, match="apply_chat_template = true, but the model's tokenizer has no chat template"):
        prompts(path, plain, apply_chat_template=True)
    chat.chat_template = REFUSING
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: the chat template refuses these messages: roles must alternate"
    ):
        prompts(path, chat)


def test_tokenizer_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"the tokenizer in {tmp_path} cannot be loaded"):
        load_tokenizer(tmp_path)


def test_the_quick_way_to_a_tokenizer_gives_the_same_one(tiny_model: Path, plain: Any) -> None:
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(tiny_model)
    assert type(slow) is type(plain)
    assert slow.get_vocab() == plain.get_vocab() and slow.special_tokens_map == plain.special_tokens_map


def test_tokenizing_does_not_import_torch(tiny_model: Path) -> None:
    code = f"import sys; from asyncrl.data import load_tokenizer; load_tokenizer({str(tiny_model)!r})\n"
    code += "print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
