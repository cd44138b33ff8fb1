"""A placement that the package does not have, in one record: FAN in front of attention and in place of the MLP, too.

It is registered here, and in the table of exports; then it trains in two layouts, is counted, exported and read back.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_fanformer.checkpoint import store
from megatron_fanformer.formats.checkpoints import open_checkpoint
from megatron_fanformer.formats.convert import convert_checkpoint
from megatron_fanformer.formats.fan_of_tensors import fan_of_tensors
from megatron_fanformer.hf.configuration_fanformer import FAN_PLACEMENTS, FANPlacement
from megatron_fanformer.model.config import FANConfig, FANformerConfig
from megatron_fanformer.model.placements import PLACEMENTS, Placement
from megatron_fanformer.planning.gradient_buffers import layer_weights
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.training.metrics import read_metrics
from tests.small_runs import VOCAB_SIZE, small_run, write_tokens
from tests.tiny import tiny_model
from tests.training.test_trainer import train

EVERYWHERE = Placement(name="everywhere", model="FANformer with FAN layers for its MLP", in_attention=True, in_ffn=True)
STEPS = 3
RunOnRanks = Callable[..., list[Any]]
SAME = 1e-5  # relative: float32 sums in another order


@contextmanager
def registered() -> Iterator[None]:
    """The placement's two entries, for the block."""
    with ExitStack() as stack:
        stack.enter_context(patch.dict(PLACEMENTS, {EVERYWHERE.name: EVERYWHERE}))
        stack.enter_context(patch.dict(FAN_PLACEMENTS, {EVERYWHERE.name: FANPlacement(in_attention=True, in_ffn=True)}))
        yield


def train_everywhere(values: dict[str, Any]) -> int:
    """Run a configuration of the placement; the weights of this rank's stages."""
    with registered():
        _, after = train(values)
        return sum(shard[-1].numel() for shard in after)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, run_on_ranks: RunOnRanks) -> dict[int, tuple[Path, int]]:
    """A run at each tensor parallel size, and the weights that a rank of it has."""
    folder = tmp_path_factory.mktemp("everywhere")
    tokens, made = write_tokens(folder / "tokens"), {}
    for ranks in (1, 2):
        run = folder / f"tp{ranks}"
        values = small_run(
            tokens,
            run,
            model={"fan": {"placement": EVERYWHERE.name}},
            parallel={"tensor_model_parallel_size": ranks},
            training={"train_iters": STEPS},
            schedule={"lr_warmup_iters": 0},
        )
        made[ranks] = (run, run_on_ranks(ranks, train_everywhere, values)[0])
    return made


def test_layouts_train_the_same_model(runs: dict[int, tuple[Path, int]]) -> None:
    alone, split = ([entry["loss"] for entry in read_metrics(runs[ranks][0])] for ranks in (1, 2))
    assert len(alone) == STEPS and split == pytest.approx(alone, rel=SAME)


def test_it_is_counted(runs: dict[int, tuple[Path, int]]) -> None:
    with registered():
        model = FANformerConfig.from_dict(store.saved_config(store.complete_checkpoints(runs[1][0])[-1])["model"])
        assert model.num_parameters == runs[1][1]
        layers = sum(weight.elements for weight in layer_weights(model, ParallelConfig()))
        others = model.padded_vocab_size * model.hidden_size + model.hidden_size
        assert model.num_layers * layers + others == model.num_parameters


def test_it_goes_out_and_comes_back(runs: dict[int, tuple[Path, int]], tmp_path: Path) -> None:
    with registered():
        convert_checkpoint(runs[2][0], tmp_path / "hf", to="hf")
        convert_checkpoint(tmp_path / "hf", tmp_path / "back", to="megatron")
        before, after = open_checkpoint(runs[1][0]), open_checkpoint(tmp_path / "back")
        assert after.config.fan == before.config.fan
        split = open_checkpoint(runs[2][0])
        assert split.tensors.keys() == after.tensors.keys()
        for name in split.tensors:
            rows = VOCAB_SIZE if "word_embeddings" in name else None  # an export has no padding
            assert torch.equal(split.tensors[name][:rows], after.tensors[name][:rows]), name
        seen = fan_of_tensors({name: tuple(tensor.shape) for name, tensor in after.tensors.items()})
        assert seen.placement == EVERYWHERE.name


def test_without_its_entry_it_is_refused() -> None:
    (problem,) = tiny_model(fan=FANConfig(placement="everywhere")).problems()
    assert problem.startswith("model.fan.placement is 'everywhere', not qkv, qk_and_v, ffn, none; ")
