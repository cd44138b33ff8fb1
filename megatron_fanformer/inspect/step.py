"""The exact samples of a training step, and the documents that they come from.

Datasets and order are the trainer's own (`train.samples`); `data.origins` says where a sample's tokens are stored,
and the ledger of their token files which document they belong to.
"""

import dataclasses
import itertools
import json
import os.path
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.remote import on_this_machine
from megatron_fanformer.checkpoint.stored_files import read_table, saved_progress
from megatron_fanformer.convert.recognition import DESCRIPTIONS, OURS, Target, recognise
from megatron_fanformer.data.fingerprint import another_tokenizer, fingerprint_from_plain
from megatron_fanformer.data.ledger import LedgerRow, open_ledger
from megatron_fanformer.data.manifest import read_manifest
from megatron_fanformer.data.mixes import FIRST_MIX
from megatron_fanformer.data.samples import ChatDataset, Span, sample_spans
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import InputError, escaped
from megatron_fanformer.model.layout_rules import batch_problems
from megatron_fanformer.terminal import plural
from megatron_fanformer.train.config import RunConfig, load_config
from megatron_fanformer.train.preflight import check_data, with_steps
from megatron_fanformer.train.recovery import read_events
from megatron_fanformer.train.run_log import run_log
from megatron_fanformer.train.samples import consumed_before, run_datasets, step_micro_batches

HEAD_CHARACTERS, TAIL_CHARACTERS = 100, 40  # of a shortened text
SHOWN_IDS = 16  # where no tokenizer is known
BETWEEN = " … "


Report = dict[str, Any]


def inspect_step(
    path: str, step: int, config: Path | None = None, overrides: Sequence[str] = (), *, full: bool = False
) -> Report:
    """Return the samples of a training step, and the documents that they come from.

    Args:
        path: a run, a checkpoint or a configuration file; or, with `config`, token files that it trains on: samples
            without tokens of these are left out.
        step: counted from 1.
        config: the configuration that trains; None: the path's.
        overrides: fields of the configuration, as on a command line.
        full: whole texts, and the ids of all tokens.

    Raises:
        InputError: the configuration, the step or the path is wrong; the run took the step's samples of other data.
        CorruptError: token files or a ledger are damaged, or a checkpoint is.
    """
    path = on_this_machine(path)
    only = folder = None
    if Path(path).suffix in (".yaml", ".yml") and Path(path).is_file():
        return describe_step(load_config(config or Path(path), overrides), step, full=full)
    target = recognise(path)
    if target.kind in OURS:
        loaded = load_config(config or target.path / run_folder.CONFIG, overrides)
        if config is None:
            _refuse_former_data(target, step)
            folder = target.path if target.kind == "run" else target.path.parent.parent
    elif not target.is_data:
        kind = DESCRIPTIONS[target.kind]
        raise InputError(f"{path} is {kind}, which does not say what it was trained on; name a run's folder")
    elif config is None:
        raise InputError(
            f"{path} is token files, and --step needs the configuration that trains on them; add --config FILE"
        )
    else:
        loaded, only = load_config(config, overrides), target
    return describe_step(loaded, step, only=only, folder=folder, full=full)


def index_data(path: str, overrides: Sequence[str] = ()) -> str:
    """Make the index cache that a run of a configuration file needs; returns a line for the user.

    Raises:
        InputError: the configuration is wrong, or its data are not what it needs.
        CorruptError: token files are damaged.
    """
    if Path(path).suffix not in (".yaml", ".yml"):
        raise InputError(f"{path} is no configuration file (.yaml), as --index takes it; name one")
    run = load_config(Path(path), overrides)
    problems = [*run.model.problems(), *run.data.problems(), *run.training.problems()] or run.problems_of_steps(1)
    if problems:
        raise InputError("\n".join(problems))
    with run_log(rank=0):
        run = with_steps(run)
        run_datasets(run, check_data(run))
    return f"{run.data.index_cache()}: ready for {path}"


def _refuse_former_data(target: Target, step: int) -> None:
    """Raise InputError for a step that a run took before a change of its training data, which its configuration lacks.

    `target` is a run with its newest checkpoint, which has the changes; or one checkpoint.
    """
    checkpoint = target.path if target.kind == "checkpoint" else run_folder.latest_checkpoint(target.path)
    progress = saved_progress(checkpoint, read_table(checkpoint)) if checkpoint else None
    fingerprint = fingerprint_from_plain(progress.data, checkpoint) if checkpoint and progress else None
    changes = fingerprint.training_changes if fingerprint else []
    if not (later := [change for change in changes if change.step >= step]):
        return
    last = later[0].step
    first = max((change.step for change in changes if change.step < step), default=0) + 1
    changed = "; ".join(change.what for change in later if change.step == last)
    raise InputError(
        f"--step is {step}, and the training data were changed after step {last} ({changed}): the configuration has "
        f"other data than that step read; name a checkpoint of step {first} to {last}, or its configuration by --config"
    )


def describe_step(
    config: RunConfig, step: int, *, only: Target | None = None, folder: Path | None = None, full: bool = False
) -> Report:
    """Return the samples of a run's step, by micro batch, with the passages of documents that each is made of.

    Args:
        config: of the run.
        step: counted from 1.
        only: leave out samples without tokens of these files.
        folder: of the run, which may have been moved or fetched; None: as its configuration says.
        full: whole texts, and the ids of all tokens.

    Raises:
        InputError: the configuration or the step is wrong, or `only` names no training data of it.
        CorruptError: token files or a ledger are damaged.
    """
    replicas = config.parallel.resolve_data_parallel_size(None)
    config = _checked(config, step, replicas)
    wanted = _training_prefixes(config, only) if only else None
    dataset = run_datasets(config).train
    sources = _Sources(config, full=full)
    batches = []
    for batch in step_micro_batches(config, len(dataset), step, replicas):
        samples = []
        for number in batch.samples:
            spans = sample_spans(dataset, number)
            if wanted is None or wanted & {os.path.abspath(span.prefix) for span in spans}:
                samples.append({"sample": number, "passages": list(_passages(sources, dataset, number, spans))})
        if samples:
            place = {"micro_batch": batch.number, "data_parallel_rank": batch.data_parallel_rank}
            batches.append({**place, "samples": samples})
    training, stages = config.training, config.mix_steps()
    first = consumed_before(config, step)
    events = read_events(folder or Path(training.run_dir))
    skipped = [event.get("reason") for event in events if event["event"] == "skipped" and event["step"] == step]
    return {
        "kind": "training step",
        "step": step,
        "steps": training.steps,
        "stage": [FIRST_MIX, *(name for name, begin in stages.items() if begin <= step)][-1] if stages else None,
        "skipped": str(skipped[-1]) if skipped else None,
        "first_sample": first,
        "end_sample": first + training.global_batch_size,
        "data_parallel_size": replicas,
        "micro_batches_a_rank": config.num_micro_batches(replicas),
        "micro_batch_size": training.micro_batch_size,
        "seq_length": config.model.seq_length,
        "without_ledger": [prefix for prefix, ledger in sources.ledgers.items() if ledger is None],
        "of_other_tokenizers": sources.notes,
        "micro_batches": batches,
    }


class _Sources:
    """The ledgers and tokenizers of the token files that a step reads, each opened once."""

    def __init__(self, config: RunConfig, *, full: bool) -> None:
        self.full = full
        self.ledgers: dict[str, Any] = {}
        self.notes: list[str] = []
        """A line for each prefix that was made with another tokenizer than there is."""
        self._path = config.data.tokenizer
        self._tokenizer_of = cache(self._find_tokenizer)
        self._load = cache(lambda path: load_tokenizer(path, needs_eod=False))  # nothing is encoded
        self._sha256_of = cache(sha256_of)

    def documents(self, span: Span) -> Iterator[tuple[int, int, LedgerRow | None]]:
        """Yield the first token and the length of a span's part of each document."""
        if span.prefix not in self.ledgers:
            self.ledgers[span.prefix] = open_ledger(span.prefix)
        if (ledger := self.ledgers[span.prefix]) is None:
            yield span.first_token, span.length, None
            return
        for document in ledger.documents(span.first_token, span.length):
            begin = max(span.first_token, document.first_token)
            end = min(span.first_token + span.length, document.first_token + document.length)
            yield begin, end - begin, document

    def text(self, prefix: str, ids: list[int]) -> str | None:
        """Return the text of tokens of a prefix, shortened unless `full`; None where no tokenizer is known.

        Raises:
            InputError: the tokenizer cannot be the one that made the tokens, or cannot be read.
        """
        tokenizer = self._tokenizer_of(prefix)
        if tokenizer is None:
            return None
        if ids and max(ids) >= tokenizer.vocab_size:
            raise InputError(
                f"{prefix} holds token id {max(ids)}, but {tokenizer.path} has {tokenizer.vocab_size}"
                " ids; set data.tokenizer to the one that made the tokens"
            )
        text: str = tokenizer.decode(ids)
        if self.full or len(text) <= HEAD_CHARACTERS + TAIL_CHARACTERS + len(BETWEEN):
            return text
        return text[:HEAD_CHARACTERS] + BETWEEN + text[-TAIL_CHARACTERS:]

    def _find_tokenizer(self, prefix: str) -> Any:
        """Return `data.tokenizer`, else the one that the prefix's manifest names; None where neither is known."""
        manifest = read_manifest(prefix)
        stated = manifest.tokenizer if manifest else None
        if self._path is not None:
            tokenizer = self._load(self._path)
            sha256 = self._sha256_of(tokenizer.path)
            if stated and (other := another_tokenizer([stated.sha256], sha256, "data.tokenizer")):
                self.notes.append(
                    f"{prefix} was made with {other}; unless both give the same ids, this is not its text"
                )
            return tokenizer
        if stated is None or not (file := Path(stated.path)).is_file():
            return None
        if self._sha256_of(file) == stated.sha256:
            return self._load(stated.path)
        self.notes.append(
            f"{prefix} was made with another tokenizer than {file} is now; set data.tokenizer to that one"
        )
        return None


def _passages(sources: _Sources, dataset: Any, number: int, spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    """Yield the passages of a sample: consecutive tokens of a token file, of one document where there is a ledger."""
    item = dataset[number]
    ids, learned = item["tokens"].tolist(), None
    if isinstance(dataset, ChatDataset):  # for each token whether the position before it has a loss
        learned = [False, *(item["loss_mask"] > 0).tolist()]
    elif sum(span.length for span in spans) > len(ids):  # it reads one more, as the last label
        ids.append(int(item["labels"][-1]))
    position = 0
    for span in spans:
        for first_token, length, document in sources.documents(span):
            end = position + length
            passage_ids, mask = ids[position:end], learned and learned[position:end]
            position = end
            text = sources.text(span.prefix, passage_ids)
            shown = passage_ids if sources.full else passage_ids[:SHOWN_IDS] if text is None else None
            row = document and {
                "id": document.id,
                "source": document.source,
                "shard": document.shard,
                "line": document.line,
                "first_token": first_token - document.first_token,
                "length": document.length,
            }
            passage = {"prefix": span.prefix, "first_token": first_token, "length": length, "document": row}
            if mask is not None:
                passage["learned"] = runs = _true_runs(mask)
                passage["learned_texts"] = [sources.text(span.prefix, passage_ids[begin:end]) for begin, end in runs]
            yield {**passage, "text": text, **({} if shown is None else {"ids": shown})}
    assert learned is not None or position == len(ids), "the spans of a sample are all that it reads"


def _true_runs(mask: list[bool]) -> list[tuple[int, int]]:
    """Return the begin and the end of each run of true values."""
    groups = itertools.groupby(range(len(mask)), key=mask.__getitem__)
    runs = [list(group) for is_true, group in groups if is_true]
    return [(run[0], run[-1] + 1) for run in runs]


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


def _training_prefixes(config: RunConfig, only: Target) -> set[str]:
    """Return the prefixes of `only` as absolute paths. Raises InputError where none is training data."""
    wanted = set(map(os.path.abspath, only.prefixes))
    blends = map(config.data.blend, (config.data.train_data, *config.data.stages.values()))
    training = {
        os.path.abspath(prefix): prefix for blend in blends for source in blend.sources for prefix in source.prefixes
    }
    if not wanted & training.keys():
        raise InputError(
            f"{only.path} is not in the configuration's data.train_data ({', '.join(training.values())}); "
            "name one of these, or the configuration file itself"
        )
    return wanted


def step_lines(report: Report) -> Iterator[str]:
    """Yield the report of a step as text."""
    yield (
        f"step {report['step']} of {report['steps']}: samples {report['first_sample']} to {report['end_sample'] - 1}, "
        f"of {report['seq_length']} tokens"
    )
    yield (
        f"{plural(report['data_parallel_size'], 'data parallel rank')} x {report['micro_batches_a_rank']} micro batches"
        f" x {plural(report['micro_batch_size'], 'sample')}"
    )
    for label, text in (("mix", report["stage"]), ("skipped", report["skipped"])):
        if text:
            yield f"{label}: {escaped(text)}"
    for batch in report["micro_batches"]:
        yield ""
        yield f"micro batch {batch['micro_batch']}, data parallel rank {batch['data_parallel_rank']}"
        for sample in batch["samples"]:
            yield f"  sample {sample['sample']}"
            for passage in sample["passages"]:
                yield from map(escaped, _passage_lines(passage))
    if report["without_ledger"]:
        yield ""
        names = ", ".join(f"{prefix}.ledger.parquet" for prefix in report["without_ledger"])
        yield f"no ledger ({names}): these tokens' documents are unknown; prepare writes one"
    yield from map(escaped, ["", *report["of_other_tokenizers"]] if report["of_other_tokenizers"] else [])


def _passage_lines(passage: dict[str, Any]) -> Iterator[str]:
    """Yield the origin of a passage and its text; tokens count from 0, and ends are excluded, as in Python's slices."""
    first, length, document = passage["first_token"], passage["length"], passage["document"]
    place = f"{passage['prefix']} [{first}:{first + length}]"
    if document is not None:
        begin = document["first_token"]
        name = (document["id"] or "no id") + (f" ({document['source']})" if document["source"] else "")
        tokens = f"tokens [{begin}:{begin + length}] of {document['length']}"
        place = f"{document['shard']}:{document['line']}  {name}  {tokens}  = {place}"
    yield f"    {place}"
    if (text := passage["text"]) is None:
        ids = passage["ids"]
        yield f"      ids {' '.join(map(str, ids))}{BETWEEN.rstrip() if len(ids) < length else ''}"
    else:
        whole = text.split("\n") if "ids" in passage else [json.dumps(text, ensure_ascii=False)]
        yield from (f"      {line}" for line in whole)
    for (begin, end), learned in zip(passage.get("learned", ()), passage.get("learned_texts", ()), strict=True):
        yield f"      learned {begin}:{end}  {json.dumps(learned, ensure_ascii=False) if learned else ''}".rstrip()
