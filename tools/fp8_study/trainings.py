"""The trainings that are compared, and one of them on its rank: the project's own Trainer, its phases watched."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fp8_study.phase_errors import FANMap, measure
from megatron_fanformer.data.tokenizer import TOKENIZER_MODEL, train_sentencepiece
from megatron_fanformer.demo.corpus import pack_standard_library
from megatron_fanformer.preparation.document_files import read_documents
from megatron_fanformer.preparation.prepare import prepare
from megatron_fanformer.preparation.verb import PrepareConfig

VALIDATION = "held-out"
FP8_FORMAT = "hybrid"  # e4m3 forward, e5m2 gradients
ENGINE, LOCAL = "transformer_engine", "local"


class Arm(NamedTuple):
    """A model in a number format."""

    name: str
    placement: str
    fp8: bool = False
    fp8_fan: bool = False
    layers: str = ENGINE

    def sections(self, recipe: str) -> dict[str, dict[str, Any]]:
        """What it sets in a run's configuration."""
        fp8 = {"fp8": FP8_FORMAT, "fp8_recipe": recipe, "fp8_fan": self.fp8_fan} if self.fp8 else {}
        return {
            "model": {"fan": {"placement": self.placement}},
            "kernels": {"transformer_impl": self.layers},
            "precision": {"dtype": "bf16", **fp8},
        }


FAN_BF16 = Arm("FANformer bf16", "qkv")
FAN_BF16_AGAIN = Arm("FANformer bf16, local layers", "qkv", layers=LOCAL)
FAN_FP8 = Arm("FANformer FP8, FAN map bf16", "qkv", fp8=True)
FAN_ALL_FP8 = Arm("FANformer FP8, FAN map FP8", "qkv", fp8=True, fp8_fan=True)
PLAIN_BF16 = Arm("Transformer bf16", "none")
PLAIN_FP8 = Arm("Transformer FP8", "none", fp8=True)
ARMS = (FAN_BF16, FAN_BF16_AGAIN, FAN_FP8, FAN_ALL_FP8, PLAIN_BF16, PLAIN_FP8)
BASES = {FAN_BF16_AGAIN: FAN_BF16, FAN_FP8: FAN_BF16, FAN_ALL_FP8: FAN_BF16, PLAIN_FP8: PLAIN_BF16}
"""What a training is held against. The local layers compute the same in bf16, but sum and round otherwise: what they
change is what a training makes of rounding errors, of whatever kind."""


class Size(NamedTuple):
    """The model's size and the length of a training; every width a multiple of 16, for FP8."""

    num_layers: int = 4
    hidden_size: int = 128
    ffn_hidden_size: int = 352
    num_attention_heads: int = 4
    vocab_size: int = 1024
    seq_length: int = 128
    batch_size: int = 8
    steps: int = 300
    lr: float = 3e-3
    eval_batches: int = 40


def write_corpus(folder: Path, vocab_size: int) -> None:
    """Token files of the standard library's sources and their tokenizer; what is there is left as it is."""
    corpus = pack_standard_library(folder / "documents")
    tokenizer = folder / TOKENIZER_MODEL
    if not tokenizer.exists():
        texts = (text for shard in corpus.train for text in read_documents(shard) if isinstance(text, str))
        train_sentencepiece(texts, tokenizer.with_suffix(""), vocab_size=vocab_size)
    for part, shards in {"train": corpus.train, VALIDATION: (corpus.held_out,)}.items():
        inputs = tuple(map(str, shards))
        prepare(PrepareConfig(inputs=inputs, output=str(folder / part), tokenizer=str(tokenizer), workers=1))


def run_values(arm: Arm, size: Size, *, recipe: str, seed: int, corpus: Path, run: Path) -> dict[str, Any]:
    """The configuration of one training, as plain values."""
    sections = arm.sections(recipe)
    shape = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size", "seq_length")
    return {
        "model": {**{name: getattr(size, name) for name in shape}, **sections["model"]},
        "kernels": sections["kernels"],
        "runtime": {"device": "cuda"},
        "precision": sections["precision"],
        "data": {"train_data": [str(corpus / "train")], "valid_data": {VALIDATION: [str(corpus / VALIDATION)]}},
        "optimizer": {"lr": size.lr, "adam_eps": 1e-8},
        "schedule": {"lr_warmup_iters": size.steps // 10},
        "training": {
            "run_dir": str(run),
            "train_iters": size.steps,
            "global_batch_size": size.batch_size,
            "micro_batch_size": size.batch_size,
            "eval_iters": size.eval_batches,
            "seed": seed,
        },
        "logging": {"tensorboard": False, "log_interval": max(1, size.steps // 4)},
    }


# -- on the rank


def train(values: dict[str, Any]) -> dict[str, Any]:
    """Run a configuration; its losses, and the errors of its phases before, half-way and after."""
    from megatron_fanformer.checkpoint.store import VALIDATION_LOSS
    from megatron_fanformer.runtime.parallel import rank_grid
    from megatron_fanformer.training.config import config_from_dict
    from megatron_fanformer.training.metrics import read_metrics
    from megatron_fanformer.training.trainer import Trainer

    config = config_from_dict(values)
    steps = config.training.train_iters
    started = time.monotonic()
    with rank_grid(config.parallel, "cuda") as grid:
        trainer = Trainer(config, grid)
        try:
            # Where the Engine's layers are: the norm is a part of the map there.
            is_watched = config.model.has_fan and config.kernels.transformer_impl == ENGINE
            phases = {0: observe(trainer)} if is_watched else {}
            while trainer.step < steps:
                trainer.take_step()
                if is_watched and trainer.step in (steps // 2, steps):
                    phases[trainer.step] = observe(trainer)
        finally:
            trainer.close()
    metrics = read_metrics(Path(config.training.run_dir))
    return {
        "losses": [entry["loss"] for entry in metrics],
        "validation": metrics[-1][f"{VALIDATION_LOSS}/{VALIDATION}"],
        "phases": {str(step): found for step, found in phases.items()},
        "seconds": time.monotonic() - started,
    }


def observe(trainer: Any) -> dict[str, Any]:
    """The errors of all layers' phases over the first validation batch."""
    from megatron_fanformer.training.evaluation import evaluate_loss

    with watched_maps(trainer._stages[0]) as seen:
        evaluate_loss(trainer._wrapped, trainer._data.valid[VALIDATION], trainer.grid, trainer.config, eval_iters=1)
    return measure(seen, is_fp8=trainer.config.precision.fp8_fan)


@contextmanager
def watched_maps(stage: Any) -> Iterator[list[FANMap]]:
    """Every FAN map of a stage with what passes through it meanwhile, in the order of the layers."""
    seen: list[FANMap] = []
    maps = [layer.self_attention.fan for layer in stage.decoder.layers]
    handles = [fan.linear.register_forward_hook(_recorder(fan, seen)) for fan in maps]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _recorder(fan: Any, seen: list[FANMap]) -> Any:
    def record(linear: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
        tensors = (inputs[0].flatten(0, 1), linear.layer_norm_weight, linear.weight, linear.bias, output[0])
        hidden, norm, weight, bias, computed = (tensor.detach().cpu().clone() for tensor in tensors)
        (rows,) = fan.shard.outputs
        seen.append(FANMap(hidden, norm, linear.eps, weight, bias, rows.periodic, computed.flatten(0, 1)))

    return record
