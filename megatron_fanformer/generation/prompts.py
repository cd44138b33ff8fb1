"""Files of prompts: JSON lines, or a prompt a line."""

import json
from pathlib import Path

from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import InputError

JSON_LINES = (".jsonl", ".ndjson")
MOST_BYTES = 1 << 30


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file, in order; lines of white space alone are passed over.

    A file named .jsonl or .ndjson has a JSON object with the field `prompt` on each line, and prompts of several lines
    need one. In any other file each line is a prompt.

    Raises:
        InputError: it cannot be read, is not UTF-8, holds no prompt, or a line is not such an object.
    """
    try:
        lines = regular_file(path, most_bytes=MOST_BYTES).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise InputError(f"prompts {path} cannot be read ({error.strerror}); name a text or JSON lines file") from error
    except UnicodeDecodeError:
        raise InputError(f"prompts {path} are not valid UTF-8; write them in that") from None
    numbered = [(number, line.removesuffix("\r")) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise InputError(f"prompts {path} holds no prompt; write one a line")
    if path.suffix in JSON_LINES:
        return [_prompt_of(path, number, line) for number, line in numbered]
    return [line for _, line in numbered]


def _prompt_of(path: Path, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, TypeError, KeyError, RecursionError):
        prompt = None
    if not isinstance(prompt, str):
        raise InputError(
            f'line {number} of prompts {path} is not a JSON object with a text in "prompt"; write one a line'
        )
    return prompt
