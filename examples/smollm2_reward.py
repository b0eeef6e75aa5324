"""A reward of the kind that users write: is the number in <answer> tags the right one?"""

from __future__ import annotations

import re

from asyncrl.rewards import last_number

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
FORMAT_REWARD = 0.2
CORRECT_REWARD = 0.8


def number_in_tags(completion: str, answer: float) -> dict[str, float]:
    """0.2 for one pair of tags with a number inside, and 0.8 more if it is the row's `answer`."""
    tagged = ANSWER.findall(completion)
    number = last_number(tagged[-1]) if tagged else None
    return {
        "format": FORMAT_REWARD * (len(tagged) == 1 and number is not None),
        "correct": CORRECT_REWARD * (number is not None and number == float(answer)),
    }
