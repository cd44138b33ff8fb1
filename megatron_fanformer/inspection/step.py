"""The exact samples of a training step, and the documents that they are made of.

Datasets and order are the trainer's own (`training.samples`); `data.origins` says where a sample's tokens are stored,
and the ledger of their token files which document they belong to.
"""

import dataclasses
import os.path
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron_fanformer.checkpoint import store
from megatron_fanformer.checkpoint.stored_files import saved_progress
from megatron_fanformer.checkpoint.tensor_table import read_table
from megatron_fanformer.data.chat_dataset import ChatDataset
from megatron_fanformer.data.identity import another_tokenizer, identity_from_plain
from megatron_fanformer.data.ledger import Ledger, LedgerRow, open_ledger
from megatron_fanformer.data.manifest import Manifest, read_any_manifest
from megatron_fanformer.data.origins import Span, sample_spans
from megatron_fanformer.data.stages import FIRST_STAGE
from megatron_fanformer.data.tokenizer import Tokenizer, load_tokenizer
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import InputError
from megatron_fanformer.formats.recognition import Target
from megatron_fanformer.model.layout_rules import batch_problems
from megatron_fanformer.training.chats import with_steps
from megatron_fanformer.training.config import RunConfig
from megatron_fanformer.training.samples import MicroBatch, consumed_before, run_datasets, step_micro_batches


@dataclass(frozen=True)
class Passage:
    """Consecutive tokens of a sample in a token file, of one document where a ledger says which."""

    prefix: str
    first_token: int
    """Position of its first token in the token file, in tokens."""
    ids: list[int]
    document: LedgerRow | None
    """The ledger's row of its document; None where the token files have no ledger."""
    learned: list[bool] | None = None
    """A mask, for chats, of the tokens that have a loss as labels."""


@dataclass(frozen=True)
class Sample:
    """One sample of a step."""

    number: int
    """The sample's number in the run's order, from 0."""
    ids: list[int]
    """All tokens that it reads: the inputs and the last label."""
    passages: list[Passage]


def refuse_former_data(target: Target, step: int) -> None:
    """Refuse a step that a run took before a change of its training data, which its configuration does not have.

    Args:
        target: a run with its newest checkpoint, which has the changes; or one checkpoint.

    Raises:
        InputError: it is such a step.
        CorruptError: the checkpoint cannot be read.
    """
    checkpoint = target.path if target.kind == "checkpoint" else store.latest_checkpoint(target.path)
    progress = saved_progress(checkpoint, read_table(checkpoint)) if checkpoint else None
    identity = identity_from_plain(progress.data, checkpoint) if checkpoint and progress else None
    changes = identity.training_changes if identity else []
    if not (later := [change for change in changes if change.step >= step]):
        return
    last = later[0].step
    first = max((change.step for change in changes if change.step < step), default=0) + 1
    what = "; ".join(change.what for change in later if change.step == last)
    raise InputError(
        f"--step is {step}, and the training data were changed after step {last} ({what}): the configuration has "
        f"other data than that step read; name a checkpoint of step {first} to {last}, or its configuration by --config"
    )


class StepSamples:
    """The samples of a run's step: `micro_batches` iterates over them.

    Args:
        config: of the run.
        step: counted from 1.
        only: leave out samples without tokens of these files.
        folder: of the run, which may have been moved or fetched; None: as its configuration says.

    Raises:
        InputError: the configuration or the step is wrong, or `only` names no training data of it.
        CorruptError: token files or a ledger are damaged.
    """

    def __init__(self, config: RunConfig, step: int, only: Target | None = None, *, folder: Path | None = None) -> None:
        self.data_parallel_size = config.parallel.resolve_data_parallel_size(None)
        self.config, self.step = _checked(config, step, self.data_parallel_size), step
        config = self.config
        self.only = _checked_prefixes(config, only) if only else None
        self.dataset = run_datasets(config).train
        self.first = consumed_before(config, step)
        self.end = self.first + config.training.global_batch_size
        self.folder = folder or Path(config.training.run_dir)
        begun = [name for name, first in config.stage_steps().items() if first <= step]
        self.stage = [FIRST_STAGE, *begun][-1] if config.stage_steps() else None
        self.of_other_tokenizers: list[str] = []
        """A line for each prefix shown so far that was made with another tokenizer than there is."""
        self._ledgers: dict[str, Ledger | None] = {}
        self._tokenizer = cache(self._tokenizer_of)
        self._load = cache(lambda path: load_tokenizer(path, needs_eod=False))  # nothing is encoded
        self._sha256_of = cache(sha256_of)

    def micro_batches(self) -> Iterator[tuple[MicroBatch, list[Sample]]]:
        """Yield each micro batch with its samples, in the samples' order; those without tokens of `only` are left
        out.
        """
        for batch in step_micro_batches(self.config, len(self.dataset), self.step, self.data_parallel_size):
            shown = []
            for sample in map(self._sample, batch.samples):
                prefixes = {os.path.abspath(passage.prefix) for passage in sample.passages}
                if self.only is None or prefixes & self.only:
                    shown.append(sample)
            if shown:
                yield batch, shown

    def without_ledger(self) -> list[str]:
        """Return the prefixes seen so far that have no ledger."""
        return [prefix for prefix, ledger in self._ledgers.items() if ledger is None]

    def text_of(self, prefix: str, ids: list[int]) -> str | None:
        """Return the text of some tokens of a prefix; None where no tokenizer is known.

        Raises:
            InputError: the tokenizer cannot be the one that made the tokens, or cannot be read.
        """
        tokenizer = self._tokenizer(prefix)
        if tokenizer is None:
            return None
        if ids and max(ids) >= tokenizer.vocab_size:
            raise InputError(
                f"{prefix} holds token id {max(ids)}, but {tokenizer.path} has {tokenizer.vocab_size}"
                " ids; set data.tokenizer to the one that made the tokens"
            )
        return tokenizer.decode(ids)

    def _tokenizer_of(self, prefix: str) -> Tokenizer | None:
        """Return `data.tokenizer`, else the one that the prefix's manifest names; None where neither is known."""
        manifest, path = read_any_manifest(prefix), self.config.data.tokenizer
        stated = manifest.tokenizer if manifest else None
        if path is not None:
            tokenizer: Tokenizer = self._load(path)
            sha256 = self._sha256_of(tokenizer.path)
            if stated and (other := another_tokenizer([stated.sha256], sha256, "data.tokenizer")):
                self.of_other_tokenizers.append(
                    f"{prefix} was made with {other}; unless both give the same ids, this is not its text"
                )
            return tokenizer
        if stated is None or not (file := Path(stated.path)).is_file():
            return None
        if self._sha256_of(file) == stated.sha256:
            return self._load(stated.path)
        self.of_other_tokenizers.append(
            f"{prefix} was made with another tokenizer than {file} is now; set data.tokenizer to that one"
        )
        return None

    def _sample(self, number: int) -> Sample:
        item = self.dataset[number]
        spans = sample_spans(self.dataset, number)
        ids, learned = item["tokens"].tolist(), None
        if isinstance(self.dataset, ChatDataset):  # for each token whether the position before it has a loss
            learned = [False, *(item["loss_mask"] > 0).tolist()]
        elif sum(span.length for span in spans) > len(ids):  # it reads one more, as the last label
            ids.append(int(item["labels"][-1]))
        passages: list[Passage] = []
        position = 0
        for span in spans:
            for first_token, length, document in self._pieces(span):
                part = slice(position, position + length)
                passages.append(Passage(span.prefix, first_token, ids[part], document, learned and learned[part]))
                position += length
        assert learned is not None or position == len(ids), "the spans of a sample are all that it reads"
        return Sample(number, ids[:position], passages)  # without the padding behind chats

    def _pieces(self, span: Span) -> Iterator[tuple[int, int, LedgerRow | None]]:
        """Yield the first token and the length of what a span has of each document."""
        if span.prefix not in self._ledgers:
            self._ledgers[span.prefix] = open_ledger(span.prefix)
        if (ledger := self._ledgers[span.prefix]) is None:
            yield span.first_token, span.length, None
            return
        for document in ledger.documents(span.first_token, span.length):
            begin = max(span.first_token, document.first_token)
            end = min(span.first_token + span.length, document.first_token + document.length)
            yield begin, end - begin, document


def _checked(config: RunConfig, step: int, data_parallel_size: int) -> RunConfig:
    """Return the configuration with its number of steps, once what decides the samples has been checked.

    The layout is not checked against this machine, which need not train.
    """
    # Samples are the same however many replicas share the optimizer's state; and one stands in for those of a launcher.
    parallel = dataclasses.replace(config.parallel, num_distributed_optimizer_instances=1)
    config, training = dataclasses.replace(config, parallel=parallel), config.training
    found = [*config.model.problems(), *parallel.problems(), *config.data.problems(), *training.problems()]
    if not found:
        found = batch_problems(
            config.parallel, data_parallel_size, training.global_batch_size, training.micro_batch_size
        )
    if not found:
        found = config.problems_of_steps(data_parallel_size) if config.data.stages else []
    if not found:
        config = with_steps(config)
        if not 1 <= step <= config.training.steps:
            found.append(f"--step is {step}; the run has steps 1 to {config.training.steps} (training.train_iters)")
    if found:
        raise InputError("\n".join(found))
    return config


def _checked_prefixes(config: RunConfig, only: Target) -> set[str]:
    wanted = set()
    for prefix in only.prefixes:
        manifest = read_any_manifest(prefix)  # a preparation's tokens may be in parts
        parts = (
            [Path(prefix).name] if not isinstance(manifest, Manifest) else [each.prefix for each in manifest.outputs]
        )
        wanted |= {os.path.abspath(Path(prefix).parent / part) for part in parts}
    blends = map(config.data.blend, (config.data.train_data, *config.data.stages.values()))
    sources = [source for blend in blends for source in blend.sources]
    training = {os.path.abspath(prefix): prefix for source in sources for prefix in source.prefixes}
    if not wanted & training.keys():
        raise InputError(
            f"{only.path} is not in the configuration's data.train_data ({', '.join(training.values())}); "
            "name one of these, or the configuration file itself"
        )
    return wanted
