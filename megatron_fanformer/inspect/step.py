"""The exact samples of a training step, and the documents that they come from.

Datasets and order are the trainer's own (`train.samples`); `data.samples` says where a sample's tokens are stored, and
the ledger of their token files which document they belong to.
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

HEAD_CHARACTERS, TAIL_CHARACTERS = 100, 40  # of a long text
BETWEEN = " … "

Report = dict[str, Any]


def inspect_step(path: str, step: int, overrides: tuple[str, ...] = ()) -> Report:
    """Return the samples of a training step of a run, a checkpoint or a configuration file.

    Args:
        step: counted from 1.
        overrides: fields of the configuration, as on a command line.

    Raises:
        InputError: the configuration, the step or the path is wrong; the run took the step's samples of other data.
        CorruptError: token files, a ledger or a checkpoint are damaged.
    """
    path = on_this_machine(path)
    if Path(path).suffix in (".yaml", ".yml"):
        return describe_step(load_config(Path(path), overrides), step)
    target = recognize(path, OURS)
    _refuse_former_data(target, step)
    return describe_step(load_config(target.path / run_folder.CONFIG, overrides), step)


def _refuse_former_data(target: Target, step: int) -> None:
    """Raise InputError for a step that a run took before a change of its training data, which its configuration lacks.

    `target` is a run with its newest checkpoint, which has the changes; or one checkpoint.
    """
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
    """Return the samples of a step, counted from 1, by micro batch, with the passages of documents in each.

    Raises:
        InputError: the configuration or the step is wrong.
        CorruptError: token files or a ledger are damaged.
    """
    replicas = config.parallel.resolve_data_parallel_size(None)
    config = _checked(config, step, replicas)
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


def _checked(config: RunConfig, step: int, data_parallel_size: int) -> RunConfig:
    """Return the configuration with its number of steps, once what decides the samples has been checked.

    The layout is not checked against this machine, which need not train.
    """
    # Samples are the same however many replicas share the optimizer's state; and one stands in for those of a launcher.
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


def _tokenizer(prefix: str, named: str | None) -> Any:
    """Return the tokenizer `named`, else the one that made the tokens; None where it is not there any more."""
    manifest = read_manifest(prefix)
    if named is None and manifest is not None:
        file = Path(manifest.tokenizer.path)
        named = str(file) if file.is_file() and sha256_of(file) == manifest.tokenizer.sha256 else None
    return None if named is None else load_tokenizer(named, needs_eod=False)  # nothing is encoded


def _passages(
    dataset: Any, number: int, ledger_of: Callable[[str], Any], tokenizer_of: Callable[[str], Any]
) -> Iterator[Report]:
    """Yield the passages of a sample: consecutive tokens of a token file, of one document where there is a ledger."""
    item, spans = dataset[number], sample_spans(dataset, number)
    ids, learned = item["tokens"].tolist(), None
    if isinstance(dataset, ChatDataset):  # for each token whether the position before it has a loss
        learned = [False, *(item["loss_mask"] > 0).tolist()]
    elif sum(span.length for span in spans) > len(ids):  # it reads one more, as the last label
        ids.append(int(item["labels"][-1]))
    position = 0
    for span in spans:
        tokenizer = tokenizer_of(span.prefix)
        for first_token, length, document in _documents(span, ledger_of(span.prefix)):
            begin, position = position, position + length
            passage_ids = ids[begin:position]
            is_known = tokenizer is not None and max(passage_ids, default=0) < tokenizer.vocab_size
            passage: Report = {"prefix": span.prefix, "first_token": first_token, "length": length, "document": None}
            if document is not None:
                facts = {name: getattr(document, name) for name in ("id", "source", "shard", "line", "length")}
                passage["document"] = {**facts, "first_token": first_token - document.first_token}
            if learned is not None:
                passage["learned"] = _true_runs(learned[begin:position])
                if is_known:
                    passage["learned_texts"] = [tokenizer.decode(passage_ids[a:b]) for a, b in passage["learned"]]
            yield {**passage, "text": tokenizer.decode(passage_ids) if is_known else None, "ids": passage_ids}


def _documents(span: Span, ledger: Any) -> Iterator[tuple[int, int, LedgerRow | None]]:
    """Yield the first token and the length of a span's part of each document."""
    if ledger is None:
        yield span.first_token, span.length, None
        return
    for document in ledger.documents(span.first_token, span.length):
        begin = max(span.first_token, document.first_token)
        end = min(span.first_token + span.length, document.first_token + document.length)
        yield begin, end - begin, document


def _true_runs(mask: list[bool]) -> list[tuple[int, int]]:
    """Return the begin and the end of each run of true values."""
    groups = itertools.groupby(range(len(mask)), key=mask.__getitem__)
    runs = [list(group) for is_true, group in groups if is_true]
    return [(run[0], run[-1] + 1) for run in runs]


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
    """Yield the origin of a passage and its text; tokens count from 0, and ends are excluded, as in Python's slices."""
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
    if len(text) > HEAD_CHARACTERS + TAIL_CHARACTERS + len(BETWEEN):
        text = text[:HEAD_CHARACTERS] + BETWEEN + text[-TAIL_CHARACTERS:]
    return json.dumps(text, ensure_ascii=False)
