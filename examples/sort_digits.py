"""Make the demo task: a 0.64M-parameter Qwen3 with a character tokenizer, and digits to sort.

    .venv/bin/python examples/sort_digits.py data/sort

A prompt is six digits and "=" ("483920="), the answer its digits in ascending order ("023489"). The demonstrations
are wrong on purpose: 65 % of them sort in descending order. A model fine-tuned on them knows both ways and mostly
picks the wrong one, so that reinforcement learning has something to choose: the demo shows a policy choosing one of
two behaviours it knows, not learning a new skill. Evaluation prompts do not occur in the training files.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

NUM_DIGITS = 6
CHARACTERS = "0123456789=+- "
SPECIALS = ["<pad>", "<eos>", "<unk>"]


def make_model(folder: Path, *, seed: int = 0) -> None:
    """Write a randomly initialised Qwen3 (hidden 128, 3 layers, 4 heads of 32, tied embeddings) and its tokenizer."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary["<eos>"],
        pad_token_id=vocabulary["<pad>"],
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_rows(*, seed: int, num_train: int, num_eval: int) -> tuple[list[str], list[str]]:
    """Distinct digit strings, split into training and held-out ones."""
    rng = random.Random(seed)
    numbers = rng.sample(range(10**NUM_DIGITS), num_train + num_eval)
    strings = [f"{n:0{NUM_DIGITS}d}" for n in numbers]
    return strings[:num_train], strings[num_train:]


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prompt_row(digits: str) -> dict:
    return {"prompt": f"{digits}=", "answer": "".join(sorted(digits))}


def demonstration_row(digits: str, rng: random.Random) -> dict:
    descending = rng.random() < 0.65
    return {"prompt": f"{digits}=", "response": "".join(sorted(digits, reverse=descending))}


def write_all(folder: Path, *, seed: int = 0, num_train: int = 20_000, num_eval: int = 256) -> None:
    """Write model/, demonstrations.jsonl, demonstrations_eval.jsonl, prompts.jsonl and prompts_eval.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder / "model", seed=seed)
    train, held_out = make_rows(seed=seed, num_train=num_train, num_eval=num_eval)
    rng = random.Random(seed)
    write_jsonl(folder / "demonstrations.jsonl", [demonstration_row(d, rng) for d in train])
    write_jsonl(folder / "demonstrations_eval.jsonl", [demonstration_row(d, rng) for d in held_out])
    write_jsonl(folder / "prompts.jsonl", [prompt_row(d) for d in train])
    write_jsonl(folder / "prompts_eval.jsonl", [prompt_row(d) for d in held_out])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_all(arguments.folder, seed=arguments.seed)
    print(f"wrote the sorting task to {arguments.folder}")


if __name__ == "__main__":
    main()
