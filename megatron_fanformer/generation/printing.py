"""What `generate` prints: texts as they come, one after the other, or a JSON object for each."""

import json
from collections.abc import Callable, Sequence

from megatron_fanformer.generation.config import GenerateConfig
from megatron_fanformer.generation.continuation import Continuation
from megatron_fanformer.generation.generate import generate


def print_generations(config: GenerateConfig, write: Callable[[str], object]) -> None:
    """Continue prompts and write each with its continuation, in order, as far as each is known.

    Several are told apart by a line before each; a single one has none, so that the output is the text itself. With
    `config.json` it is an object a line, when a continuation has ended: prompt, sample, text, ended_by, ids.

    Raises:
        As `generate`.
    """
    generate(config, _InOrder(config, write))


class _InOrder:
    """Writes the continuations in order: the first that has not ended as it grows, those after it when it has."""

    def __init__(self, config: GenerateConfig, write: Callable[[str], object]) -> None:
        self._config, self._write = config, write
        self._shown = self._json_line if config.json else self._text
        self._number = self._written = 0  # of the continuation that is being written, and how much of it is

    def __call__(self, first: int, batch: Sequence[Continuation]) -> None:
        while self._number < first + len(batch):
            continuation = batch[self._number - first]
            shown = self._shown(continuation)
            self._write(shown[self._written :])
            self._written = len(shown)
            if not continuation.ended_by:
                return
            self._write("\n")
            self._number, self._written = self._number + 1, 0

    def _of(self) -> tuple[str, int]:
        number, sample = divmod(self._number, self._config.num_samples)
        return self._config.prompts[number], sample

    def _text(self, continuation: Continuation) -> str:
        prompt, sample = self._of()
        heading = ""
        if len(self._config.prompts) * self._config.num_samples > 1:
            number = self._number // self._config.num_samples + 1
            of_samples = f", sample {sample + 1}" if self._config.num_samples > 1 else ""
            heading = ("\n" if self._number else "") + f"--- prompt {number}{of_samples}\n"
        return heading + prompt + continuation.settled_text

    def _json_line(self, continuation: Continuation) -> str:
        prompt, sample = self._of()
        if not continuation.ended_by:
            return ""
        return json.dumps(
            {
                "prompt": prompt,
                "sample": sample,
                "text": continuation.text,
                "ended_by": continuation.ended_by,
                "ids": continuation.ids,
            }
        )
