"""Shows the samples of a training step: as text, one micro batch after the other, or as one object."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

from megatron_fanformer.errors import escaped
from megatron_fanformer.inspection.step import Passage, StepSamples
from megatron_fanformer.terminal import plural
from megatron_fanformer.training.recovery import read_events

HEAD_CHARACTERS, TAIL_CHARACTERS = 100, 40  # of a shortened text
SHOWN_IDS = 16  # where no tokenizer is known
BETWEEN = " … "


def lines(samples: StepSamples, *, full: bool) -> Iterator[str]:
    """Yield everything, for people; `full` shows whole texts."""
    config = samples.config
    yield (
        f"step {samples.step} of {config.training.steps}: samples {samples.first} to {samples.end - 1}, "
        f"of {config.model.seq_length} tokens"
    )
    yield (
        f"{plural(samples.data_parallel_size, 'data parallel rank')}"
        f" x {config.num_micro_batches(samples.data_parallel_size)} micro batches"
        f" x {plural(config.training.micro_batch_size, 'sample')}"
    )
    if samples.stage:
        yield f"mix: {escaped(samples.stage)}"
    if reason := _skipped(samples):
        yield f"skipped: {escaped(reason)}"
    for batch, own in samples.micro_batches():
        yield ""
        yield f"micro batch {batch.number}, data parallel rank {batch.data_parallel_rank}"
        for sample in own:
            yield f"  sample {sample.number}"
            for passage in sample.passages:
                yield from _passage_lines(samples, passage, full=full)
    if missing := samples.without_ledger():
        yield ""
        names = ", ".join(f"{prefix}.ledger.parquet" for prefix in missing)
        yield f"no ledger ({names}): these tokens' documents are unknown; prepare writes one"
    if notes := samples.of_other_tokenizers:
        yield ""
        yield from map(escaped, notes)


def _skipped(samples: StepSamples) -> str | None:
    """Return why the run has skipped the step, if it has; the last time that it came to it."""
    events = read_events(samples.folder)
    reasons = [event.get("reason") for event in events if event["event"] == "skipped" and event["step"] == samples.step]
    return str(reasons[-1]) if reasons else None


def _passage_lines(samples: StepSamples, passage: Passage, *, full: bool) -> Iterator[str]:
    yield f"    {escaped(_origin(passage))}"
    text = samples.text_of(passage.prefix, passage.ids)
    if text is None:
        shown = passage.ids if full else passage.ids[:SHOWN_IDS]
        yield f"      ids {' '.join(map(str, shown))}{BETWEEN.rstrip() if len(shown) < len(passage.ids) else ''}"
    elif full:
        yield from (f"      {line}" for line in escaped(text).split("\n"))
    else:
        yield f"      {escaped(shortened(text))}"
    for begin, end in learned_spans(passage):
        learned = samples.text_of(passage.prefix, passage.ids[begin:end])
        shown_text = "" if learned is None else json.dumps(learned, ensure_ascii=False) if full else shortened(learned)
        yield f"      learned {begin}:{end}  {escaped(shown_text)}".rstrip()


def learned_spans(passage: Passage) -> list[tuple[int, int]]:
    """Return the runs of learned tokens of a conversation, by their places in it; none of what is no chat."""
    groups = itertools.groupby(enumerate(passage.learned or ()), key=lambda pair: pair[1])
    runs = [[place for place, _ in group] for is_learned, group in groups if is_learned]
    return [(run[0], run[-1] + 1) for run in runs]


def _origin(passage: Passage) -> str:
    """Return where a passage comes from: tokens count from 0 and spans are half open, as Python's slices."""
    place = f"{passage.prefix} [{passage.first_token}:{passage.first_token + len(passage.ids)}]"
    if (document := passage.document) is None:
        return place
    begin = passage.first_token - document.first_token
    which = f"tokens [{begin}:{begin + len(passage.ids)}] of {document.length}"
    names = f"{document.id or 'no id'}" + (f" ({document.source})" if document.source else "")
    return f"{document.shard}:{document.line}  {names}  {which}  = {place}"


def shortened(text: str) -> str:
    """Return the beginning and the end of a text in one line, as a JSON string."""
    if len(text) > HEAD_CHARACTERS + TAIL_CHARACTERS + len(BETWEEN):
        text = text[:HEAD_CHARACTERS] + BETWEEN + text[-TAIL_CHARACTERS:]
    return json.dumps(text, ensure_ascii=False)


def _facts(samples: StepSamples, passage: Passage, *, full: bool) -> dict[str, Any]:
    text, document = samples.text_of(passage.prefix, passage.ids), passage.document
    facts: dict[str, Any] = {
        "prefix": passage.prefix,
        "first_token": passage.first_token,
        "length": len(passage.ids),
        "document": None
        if document is None
        else {
            "id": document.id,
            "source": document.source,
            "shard": document.shard,
            "line": document.line,
            "first_token": passage.first_token - document.first_token,
            "length": document.length,
        },
        **({} if passage.learned is None else {"learned": learned_spans(passage)}),
        "text": text if full or text is None else text[:HEAD_CHARACTERS],
    }
    return {**facts, "ids": passage.ids} if full else facts


def as_object(samples: StepSamples, *, full: bool) -> dict[str, Any]:
    """Return everything, for programs; `full` adds the token ids and whole texts."""
    training = samples.config.training
    batches = [
        {
            "micro_batch": batch.number,
            "data_parallel_rank": batch.data_parallel_rank,
            "samples": [
                {"sample": sample.number, "passages": [_facts(samples, p, full=full) for p in sample.passages]}
                for sample in own
            ],
        }
        for batch, own in samples.micro_batches()
    ]
    return {
        "kind": "training step",
        "step": samples.step,
        "stage": samples.stage,
        "skipped": _skipped(samples),
        "first_sample": samples.first,
        "end_sample": samples.end,
        "data_parallel_size": samples.data_parallel_size,
        "micro_batches_a_rank": samples.config.num_micro_batches(samples.data_parallel_size),
        "micro_batch_size": training.micro_batch_size,
        "seq_length": samples.config.model.seq_length,
        "without_ledger": samples.without_ledger(),
        "of_other_tokenizers": samples.of_other_tokenizers,
        "micro_batches": batches,
    }
