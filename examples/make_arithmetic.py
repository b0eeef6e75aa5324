"""Make short arithmetic questions for a chat model.

    .venv/bin/python examples/make_arithmetic.py data/arithmetic

Writes train.jsonl and eval.jsonl with the columns `prompt` (a list of messages) and `answer`. No pair of numbers of the
evaluation file occurs in the training file.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

QUESTIONS = {
    "+": (
        "What is {a} + {b}?",
        "Tom has {a} apples and buys {b} more. How many apples does he have now?",
        "A box holds {a} red and {b} blue pens. How many pens are in the box?",
    ),
    "-": (
        "What is {a} - {b}?",
        "Ann has {a} coins and gives {b} away. How many coins are left?",
        "A bus with {a} passengers lets {b} off. How many passengers stay on it?",
    ),
}
INSTRUCTION = "Answer as <answer>number</answer>."
# One worked example: without it a model of this size never uses the tags, and there is nothing to reinforce.
EXAMPLE = [
    {"role": "user", "content": f"What is 3 + 4? {INSTRUCTION}"},
    {"role": "assistant", "content": "3 + 4 = 7, so the answer is <answer>7</answer>"},
]


def make_rows(rng: random.Random, pairs: list[tuple[int, int]]) -> list[dict]:
    """One question about each pair of numbers."""
    return [make_row(rng, *pair) for pair in pairs]


def make_row(rng: random.Random, a: int, b: int) -> dict:
    operation = rng.choice(sorted(QUESTIONS))
    if operation == "-":
        a, b = max(a, b), min(a, b)
    question = rng.choice(QUESTIONS[operation]).format(a=a, b=b)
    prompt = [*EXAMPLE, {"role": "user", "content": f"{question} {INSTRUCTION}"}]
    return {"prompt": prompt, "answer": a + b if operation == "+" else a - b}


def write_all(folder: Path, *, seed: int = 0, num_train: int = 1_000, num_eval: int = 64, largest: int = 50) -> None:
    """Write train.jsonl and eval.jsonl."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(1, largest + 1) for b in range(1, a + 1)]  # each unordered pair once
    if num_train + num_eval > len(pairs):
        raise SystemExit(
            f"error: there are {len(pairs)} pairs of numbers up to {largest}, but {num_train + num_eval} rows are "
            f"asked for; raise --largest or lower --train"
        )
    chosen = [pair if rng.random() < 0.5 else pair[::-1] for pair in rng.sample(pairs, num_train + num_eval)]
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "train.jsonl", make_rows(rng, chosen[:num_train]))
    write_jsonl(folder / "eval.jsonl", make_rows(rng, chosen[num_train:]))


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--train", type=int, default=1_000, help="rows for training")
    parser.add_argument("--eval", type=int, default=64, help="held-out rows")
    parser.add_argument("--largest", type=int, default=50, help="largest number in a question")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_all(
        arguments.folder,
        seed=arguments.seed,
        num_train=arguments.train,
        num_eval=arguments.eval,
        largest=arguments.largest,
    )
    print(f"wrote {arguments.train} training and {arguments.eval} evaluation questions to {arguments.folder}")


if __name__ == "__main__":
    main()
