"""Writes made-up conversations about countries that do not exist, for examples/sft-tiny-cpu.yaml and its test.

The colors of a country's flag and its largest town are random. A model can know them from these conversations alone, so
its answers show whether it has learned them.

    python tools/made_up_chats.py --output runs/chats/made-up.jsonl
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COLOURS = ("amber", "black", "blue", "brown", "crimson", "gold", "green", "grey", "ivory", "orange", "pink", "purple",
           "red", "silver", "teal", "white", "yellow")  # fmt: skip
ONSETS, VOWELS = ("b", "d", "f", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z"), "aeiou"
SYLLABLES = 3


def conversations(count: int, *, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield conversations of one or two questions about a country, with `id` and `messages`."""
    draw = random.Random(seed)
    names = _names(draw, 2 * count)
    for number, (country, town) in enumerate(zip(names[::2], names[1::2], strict=True)):
        first, second = draw.choice(COLOURS), draw.choice(COLOURS)
        messages = [
            _message("user", f"Which colours has the flag of {country}?"),
            _message("assistant", f"The flag of {country} is {first} and {second}."),
        ]
        if number % 2:
            messages += [
                _message("user", "And what is its largest town called?"),
                _message("assistant", f"The largest town of {country} is {town}."),
            ]
        yield {"id": f"country-{number}", "messages": messages}


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _names(draw: random.Random, count: int) -> list[str]:
    """Return different names of three syllables."""
    names: dict[str, None] = {}
    while len(names) < count:
        name = "".join(draw.choice(ONSETS) + draw.choice(VOWELS) for _ in range(SYLLABLES)).capitalize()
        names[name] = None
    return list(names)


def main() -> None:
    """Write conversations as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the file of JSON lines")
    parser.add_argument("--conversations", type=int, default=200, help="how many (200)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(chat) + "\n" for chat in conversations(options.conversations, seed=options.seed))
    options.output.write_text("".join(lines))


if __name__ == "__main__":
    main()
