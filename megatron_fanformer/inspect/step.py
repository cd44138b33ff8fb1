"""Shows the exact samples of a training step, and the documents that they come from.

`train.samples` gives the datasets and the order of samples, as it does for the trainer. `data.samples` tells where the
tokens of a sample are stored; the ledger of the token files, if there is one, tells the document of a token.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.remote import on_this_machine
from megatron_fanformer.checkpoint.stored_files import read_table, saved_progress
from megatron_fanformer.convert.recognition import OURS, Target, recognize
from megatron_fanformer.data.fingerprint import fingerprint_from_plain
from megatron_fanformer.data.ledger import LedgerRow, open_ledger
from megatron_fanformer.data.manifest import read_manifest
from megatron_fanformer.data.samples import ChatDataset, Span, sample_spans
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import InputError, escaped
from megatron_fanformer.model.layout_rules import batch_problems
from megatron_fanformer.terminal import some
from megatron_fanformer.train.config import RunConfig, load_config
from megatron_fanformer.train.preflight import with_steps
from megatron_fanformer.train.samples import consumed_before, run_datasets, step_micro_batches

HEAD_CHARACTERS, TAIL_CHARACTERS = 100, 40  # shown of a long text
BETWEEN = " … "

Report = dict[str, Any]


def inspect_step(path: str, step: int, overrides: tuple[str, ...] = ()) -> Report:
    """Return the samples of a training step of a run, a checkpoint or a configuration file.

    Args:
        step: counted from 1.
        overrides: fields of the configuration, as on a command line.

    Raises:
        InputError: the configuration, the step or the path is wrong; or the run has since changed its training data.
        CorruptError: token files, a ledger or a checkpoint are damaged.
    """
    path = on_this_machine(path)
    if Path(path).suffix in (".yaml", ".yml"):
        return describe_step(load_config(Path(path), overrides), step)
    target = recognize(path, OURS)
    _refuse_changed_data(target, step)
    return describe_step(load_config(target.path / run_folder.CONFIG, overrides), step)


def _refuse_changed_data(target: Target, step: int) -> None:
    """Raise InputError if a run has changed its data since `step`; its configuration has only the newest data."""
    checkpoint = target.path if target.kind == "checkpoint" else run_folder.latest_checkpoint(target.path)
    progress = saved_progress(checkpoint, read_table(checkpoint)) if checkpoint else None
    fingerprint = fingerprint_from_plain(progress.data, checkpoint) if checkpoint and progress else None
    for change in fingerprint.training_changes if fingerprint else []:
        if change.step >= step:
            raise InputError(
                f"--step is {step}, and the training data were changed after step {change.step} ({change.what}): name "
                "a checkpoint from before, or a configuration file with the data of that step"
            )


def describe_step(config: RunConfig, step: int) -> Report:
    """Return the samples of a step (from 1) by micro batch, with the passages of documents in each sample.

    Raises:
        InputError: the configuration or the step is wrong.
        CorruptError: token files or a ledger are damaged.
    """
    replicas = config.parallel.resolve_data_parallel_size(None)  # as configured: no ranks run here
    config = _check_config(config, step, replicas)
    training, dataset = config.training, run_datasets(config).train
    ledger_of = cache(open_ledger)
    tokenizer_of = cache(lambda prefix: _tokenizer(prefix, config.data.tokenizer))
    batches = [
        {
            "micro_batch": batch.number,
            "data_parallel_rank": batch.data_parallel_rank,
            "samples": [
                {"sample": number, "passages": list(_passages(dataset, number, ledger_of, tokenizer_of))}
                for number in batch.samples
            ],
        }
        for batch in step_micro_batches(config, len(dataset), step, replicas)
    ]
    first = consumed_before(config, step)
    return {
        "kind": "training step",
        "step": step,
        "steps": training.steps,
        "first_sample": first,
        "end_sample": first + training.global_batch_size,
        "seq_length": config.model.seq_length,
        "micro_batches": batches,
    }


def _check_config(config: RunConfig, step: int, data_parallel_size: int) -> RunConfig:
    """Check the fields that decide the samples, and the step; return the configuration with its number of steps."""
    # Optimizer instances do not change the samples, but more than one would be refused: there is no launcher.
    parallel = dataclasses.replace(config.parallel, num_distributed_optimizer_instances=1)
    config, training = dataclasses.replace(config, parallel=parallel), config.training
    problems = [*config.model.problems(), *parallel.problems(), *config.data.problems(), *training.problems()]
    problems = problems or batch_problems(
        parallel, data_parallel_size, training.global_batch_size, training.micro_batch_size
    )
    if not problems and config.data.stages:
        problems = config.problems_of_steps(data_parallel_size)
    if problems:
        raise InputError("\n".join(problems))
    config = with_steps(config)
    if not 1 <= step <= config.training.steps:
        raise InputError(f"--step is {step}; the run has steps 1 to {config.training.steps} (training.train_iters)")
    return config


def _tokenizer(prefix: str, configured: str | None) -> Any:
    """Return the configured tokenizer, else the one that made the tokens; None if that has been removed or changed."""
    manifest = read_manifest(prefix)
    path = configured
    if path is None and manifest is not None:
        file = Path(manifest.tokenizer.path)
        path = str(file) if file.is_file() and sha256_of(file) == manifest.tokenizer.sha256 else None
    return None if path is None else load_tokenizer(path, needs_eod=False)  # text is decoded, not encoded


def _passages(
    dataset: Any, number: int, ledger_of: Callable[[str], Any], tokenizer_of: Callable[[str], Any]
) -> Iterator[Report]:
    """Yield the passages of a sample: consecutive tokens of one file, and if there is a ledger, of one document."""
    item, spans = dataset[number], sample_spans(dataset, number)
    ids, learned = item["tokens"].tolist(), None
    if isinstance(dataset, ChatDataset):  # a token is learned if the position before, which predicts it, has a loss
        learned = [False, *(item["loss_mask"] > 0).tolist()]
    elif sum(span.length for span in spans) > len(ids):  # the spans include the last label
        ids.append(int(item["labels"][-1]))
    position = 0
    for span in spans:
        tokenizer = tokenizer_of(span.prefix)
        for first_token, length, document in _documents(span, ledger_of(span.prefix)):
            begin, position = position, position + length
            passage_ids = ids[begin:position]
            is_decodable = tokenizer is not None and max(passage_ids, default=0) < tokenizer.vocab_size
            passage: Report = {"prefix": span.prefix, "first_token": first_token, "length": length, "document": None}
            if document is not None:
                facts = {name: getattr(document, name) for name in ("id", "source", "shard", "line", "length")}
                passage["document"] = {**facts, "first_token": first_token - document.first_token}
            if learned is not None:
                passage["learned"] = _true_runs(learned[begin:position])
                if is_decodable:
                    passage["learned_texts"] = [
                        tokenizer.decode(passage_ids[start:end]) for start, end in passage["learned"]
                    ]
            yield {**passage, "text": tokenizer.decode(passage_ids) if is_decodable else None, "ids": passage_ids}


def _documents(span: Span, ledger: Any) -> Iterator[tuple[int, int, LedgerRow | None]]:
    """Yield the first token and the length of each document's part of a span, and the document's row in the ledger."""
    if ledger is None:
        yield span.first_token, span.length, None
        return
    for document in ledger.documents(span.first_token, span.length):
        begin = max(span.first_token, document.first_token)
        end = min(span.first_token + span.length, document.first_token + document.length)
        yield begin, end - begin, document


def _true_runs(mask: list[bool]) -> list[tuple[int, int]]:
    """Return the begin and the end (exclusive) of each run of true values in a mask."""
    changes = [
        index for index, (before, after) in enumerate(itertools.pairwise([False, *mask, False])) if before != after
    ]
    return list(zip(changes[::2], changes[1::2], strict=True))


# -- as text


def step_lines(report: Report) -> Iterator[str]:
    """Yield the report of a step as text."""
    yield (
        f"step {report['step']} of {report['steps']}: samples {report['first_sample']} to {report['end_sample'] - 1}, "
        f"of {report['seq_length']} tokens"
    )
    for batch in report["micro_batches"]:
        yield ""
        yield f"micro batch {batch['micro_batch']}, data parallel rank {batch['data_parallel_rank']}"
        for sample in batch["samples"]:
            yield f"  sample {sample['sample']}"
            for passage in sample["passages"]:
                yield from map(escaped, _passage_lines(passage))


def _passage_lines(passage: Report) -> Iterator[str]:
    """Yield the place of a passage, its text, and the learned parts. Ranges of tokens are like Python's slices."""
    first, length, document, text = (passage[name] for name in ("first_token", "length", "document", "text"))
    place = f"{passage['prefix']} [{first}:{first + length}]"
    if document is not None:
        begin = document["first_token"]
        name = (document["id"] or "no id") + (f" ({document['source']})" if document["source"] else "")
        tokens = f"tokens [{begin}:{begin + length}] of {document['length']}"
        place = f"{document['shard']}:{document['line']}  {name}  {tokens}  = {place}"
    yield f"    {place}"
    yield f"      ids {some(map(str, passage['ids']))}" if text is None else f"      {_quoted(text)}"
    texts = passage.get("learned_texts") or [""] * len(passage.get("learned", ()))
    for (begin, end), learned in zip(passage.get("learned", ()), texts, strict=True):
        yield f"      learned {begin}:{end}  {_quoted(learned)}"


def _quoted(text: str) -> str:
    """Return a text in quotes and on one line; the middle of a long text is left out."""
    if len(text) > HEAD_CHARACTERS + TAIL_CHARACTERS + len(BETWEEN):
        text = text[:HEAD_CHARACTERS] + BETWEEN + text[-TAIL_CHARACTERS:]
    return json.dumps(text, ensure_ascii=False)
