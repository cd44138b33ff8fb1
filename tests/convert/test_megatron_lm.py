"""Checkpoints of stock Megatron-LM: what they hold in our names, what is refused, and that nothing is unpickled."""

import argparse
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tokenizers.text.libraries import NullTokenizer
from torch import Tensor

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.data_files import Record, read_records
from megatron_fanformer.checkpoint.full_tensors import write_full_tensors
from megatron_fanformer.checkpoint.manifest import MANIFEST, write_manifest
from megatron_fanformer.checkpoint.stored_files import COMMON
from megatron_fanformer.cli import PROGRAM, main
from megatron_fanformer.convert.megatron_lm import (
    HYBRID_NORM,
    OUR_NORM,
    _include_end_of_text,
    _unstack_layers,
    open_megatron_lm,
)
from megatron_fanformer.convert.megatron_names import FIELDS, RULES
from megatron_fanformer.convert.name_table import expected_shapes
from megatron_fanformer.convert.recognition import TRACKER, find_checkpoint
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.hf import FANformerForCausalLM
from megatron_fanformer.model.build import build_stages, sharded_state
from megatron_fanformer.model.config import FANConfig, FANformerConfig, as_transformer
from megatron_fanformer.runtime.parallel import ParallelConfig, rank_grid
from megatron_fanformer.runtime.seeding import seed_everything
from tests.convert.test_hostile import Bomb
from tests.model.test_stock_megatron import MODEL, MY_MODEL, MY_SPEC, stock_metadata
from tests.stock_megatron import (
    HAS_TRAINING,
    SPEC,
    arguments_by_hand,
    command_line,
    parsed_arguments,
    saved_arguments,
    stock_model,
)
from tests.tiny import tiny_model
from tests.train.layouts import layout
from tests.whole_models import read_full_tensors, save_state

STEP = 3
ONE_RANK = ParallelConfig()
OWN_FAN = "model: {fan: {p_ratio: 0.125}}\n"


@pytest.fixture
def convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Exit code and output of `convert SOURCE`, into the folder `out`."""

    def run(source: Path, *options: str, to: str = "megatron") -> tuple[int, str]:
        capsys.readouterr()
        code = main(["convert", str(source), str(tmp_path / "out"), "--to", to, *options])
        printed = capsys.readouterr()
        return code, (printed.out if code == 0 else printed.err.removeprefix(f"{PROGRAM}: ")).strip()

    return run


# -- as ranks of Megatron-LM save them


def save_both(model: FANformerConfig, spec: list[str], as_stock: str, as_ours: str, apart: bool) -> Tensor:
    """Save one model in stock Megatron-LM's form and in ours, at tensor parallel size 2; this rank's logits of it."""
    parallel = layout("tp=2")
    with rank_grid(parallel, "cpu") as grid:
        seed_everything(0)
        (ours,) = build_stages(model, parallel, grid, dtype=torch.float32, seed=3)
        stock = stock_model(model, parallel, spec)
        stock.load_state_dict(ours.state_dict())
        state = {
            "args": saved_arguments(model, parallel, spec),
            "checkpoint_version": 3.0,
            "iteration": STEP,
            "model": stock.sharded_state_dict(metadata={**stock_metadata(), "non_homogeneous_layers": apart}),
        }
        save_state(state, Path(as_stock))
        save_state({"model": sharded_state(ours, grid)}, Path(as_ours))
        ids = prompt(model)
        positions = torch.arange(model.seq_length).unsqueeze(0)
        mask = torch.ones(1, 1, model.seq_length, model.seq_length).triu(1).bool()
        with torch.no_grad():
            logits: Tensor = stock(ids, positions, mask)
        return logits


def prompt(model: FANformerConfig) -> Tensor:
    return torch.randint(model.vocab_size, (1, model.seq_length), generator=torch.Generator().manual_seed(1))


GROUPED = dataclasses.replace(
    MODEL, num_query_groups=2, untie_embeddings_and_output_weights=True, vocab_size=250, rotary_base=500
)
# Of the greatest logit: sums over 64 in float32 in another order, and other code for norms, rotation and SwiGLU.
SAME_LOGITS = 1e-5


@pytest.mark.parametrize(
    ("model", "spec", "apart"),
    [
        (GROUPED, SPEC, False),
        pytest.param(MY_MODEL, MY_SPEC, True, marks=pytest.mark.full),
    ],
    ids=["stacked", "apart-own-spec"],
)
def test_ranks_of_megatron_lm(
    run_on_ranks: Any, tmp_path: Path, convert: Any, model: FANformerConfig, spec: list[str], apart: bool
) -> None:
    """Every weight is ours to the bit, and the model computes what stock Megatron-LM's does."""
    (iteration := tmp_path / "saved" / f"iter_{STEP:07d}").mkdir(parents=True)
    (own := tmp_path / "own").mkdir()
    logits = torch.cat(run_on_ranks(2, save_both, model, spec, str(iteration), str(own), apart), dim=-1)
    (tmp_path / "saved" / TRACKER).write_text(str(STEP))
    (config := tmp_path / "config.yaml").write_text(OWN_FAN)
    options = ("--config", str(config)) if spec != SPEC else ()
    found, tensors, *_ = open_megatron_lm(iteration, config if options else None)
    write_manifest(own, 0)
    weights = read_full_tensors(own)
    assert found == model and tensors.keys() == weights.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in weights.items())
    code, printed = convert(tmp_path / "saved", *options, to="hf")
    assert code == 0, printed
    exported = FANformerForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        own_logits = exported(prompt(model)).logits
    expected = logits[..., : model.vocab_size]
    assert (own_logits - expected).abs().max() <= SAME_LOGITS * expected.abs().max()


@pytest.mark.skipif(not HAS_TRAINING, reason="megatron.training comes with megatron-core 0.19")
def test_the_arguments_by_hand_are_the_parsers() -> None:
    """megatron-core 0.16's Megatron-LM has two of them under other names."""
    older = {"norm_epsilon": "layernorm_epsilon", "apply_layernorm_1p": "layernorm_zero_centered_gamma"}
    for model in (MODEL, GROUPED):
        parsed = vars(parsed_arguments(command_line(model, ONE_RANK, SPEC), 1))
        by_hand = vars(arguments_by_hand(model, ONE_RANK, SPEC))
        assert {name: parsed.get(older.get(name, name), "none") for name in by_hand} == by_hand
        assert set(RULES) - parsed.keys() == {"apply_layernorm_1p"}
        assert set(FIELDS) <= parsed.keys()


# -- made in one process


def saved(
    folder: Path, model: FANformerConfig, more: Mapping[str, Tensor] = MappingProxyType({}), **changes: Any
) -> Path:
    """A checkpoint of random weights, each layer's apart, and more tensors; its arguments have changes."""
    generator = torch.Generator().manual_seed(5)
    shapes = expected_shapes(model, "megatron")
    tensors = {stock_name(name, model): torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    step = write_full_tensors(folder / "run", {**tensors, **more}, {}, {})
    iteration = step.rename(folder / f"iter_{STEP:07d}")
    for name in (run_folder.CONFIG, MANIFEST):  # ours alone
        (iteration / name).unlink()
    arguments = vars(arguments_by_hand(model, ONE_RANK, SPEC))
    common = {"args": argparse.Namespace(**{**arguments, **changes}), "iteration": STEP}
    torch.save(common, iteration / COMMON)
    (folder / TRACKER).write_text(f"{STEP}\n")
    return folder


def stock_name(name: str, model: FANformerConfig) -> str:
    """What Megatron-LM's own layer, whose norms the Engine fuses, calls a tensor; ours has names of its own."""
    if model.has_fan:
        return name
    name = name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    return name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")


def test_a_transformer_of_megatron_lms_own_layers(tmp_path: Path, convert: Any) -> None:
    model = as_transformer(tiny_model())
    code, printed = convert(saved(tmp_path / "saved", model, spec=None, vocab_size=None))
    assert code == 0, printed
    first, *others = printed.splitlines()
    assert first == f"wrote {tmp_path / 'out'}"
    assert any("do not say how many rows of the embedding are token ids" in line for line in others)
    checkpoint = find_checkpoint(tmp_path / "out")
    found = run_folder.saved_model(checkpoint)
    rows = model.padded_vocab_size
    assert found == dataclasses.replace(model, vocab_size=rows)
    assert {name: tuple(t.shape) for name, t in read_full_tensors(checkpoint).items()} == expected_shapes(
        found, "megatron"
    )


def test_an_own_spec_does_not_tell_the_fan(tmp_path: Path, convert: Any) -> None:
    folder = saved(tmp_path / "saved", tiny_model(), spec=["my_fanformer", "my_layer_spec"])
    code, printed = convert(folder)
    assert code == 2 and "(my_fanformer my_layer_spec)" in printed and "--config FILE" in printed
    (config := tmp_path / "config.yaml").write_text("model: {fan: {activation: gelu}, vocab_size: 99}\n")
    code, printed = convert(folder, "--config", str(config), "--no-verify")
    assert code == 0, printed
    expected = tiny_model(vocab_size=99, fan=FANConfig(activation="gelu"))
    assert run_folder.saved_model(find_checkpoint(tmp_path / "out")) == expected


# Arguments of Megatron-LM by which a model of the same names and shapes computes something else: what a run has set.
OTHER_MODELS: dict[str, Any] = {
    "swiglu": False,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 7.0,
    "normalization": "LayerNorm",
    "apply_layernorm_1p": True,
    "layernorm_zero_centered_gamma": True,
    "apply_residual_connection_post_layernorm": True,
    "position_embedding_type": "learned_absolute",
    "no_rope_freq": [0, 0, 0, 1],
    "rotary_percent": 0.5,
    "rotary_interleaved": True,
    "use_rope_scaling": True,
    "softmax_type": "off-by-one",
    "window_size": (128, 0),
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "mtp_num_layers": 1,
    "use_mup": True,
    "qk_l2_norm": True,
    "num_experts": 8,
    "multi_latent_attention": True,
    "kv_channels": 4,  # narrower heads than hidden_size asks
}


def test_every_argument_that_makes_another_model_is_refused(tmp_path: Path, convert: Any) -> None:
    code, printed = convert(saved(tmp_path / "saved", tiny_model(), spec=None, **OTHER_MODELS))
    assert code == 2 and len(printed.splitlines()) == 1
    for name, value in OTHER_MODELS.items():
        reason = RULES[name][1] if name in RULES else "the head size is hidden_size / num_attention_heads"
        assert f"{name} is {value!r}, but {reason}" in printed
    assert printed.count(", but ") == len(OTHER_MODELS) == len(RULES) + 1


def test_a_null_tokenizers_end_of_text_is_an_id() -> None:
    """The installed one's: before megatron-core had an argument for it, it followed --vocab-size."""
    arguments: dict[str, Any] = {"vocab_size": 250, "tokenizer_type": "NullTokenizer"}
    if "eod_id" in inspect.signature(NullTokenizer).parameters:
        arguments["null_tokenizer_eod_id"] = None
    ids = _include_end_of_text(arguments, rows=256)["vocab_size"]
    tokenizer = NullTokenizer(250)
    assert (ids, ids - 1) == (tokenizer.vocab_size, tokenizer.eod)
    for others in ({"tokenizer_type": "NullTokenizer"}, {"vocab_size": 250}, {}):
        assert _include_end_of_text(others, rows=256) == others


def test_arguments_that_are_not_there_can_be_stated(tmp_path: Path, convert: Any) -> None:
    folder = saved(tmp_path / "saved", tiny_model())
    torch.save({"iteration": STEP}, folder / f"iter_{STEP:07d}" / COMMON)
    (config := tmp_path / "config.yaml").write_text(OWN_FAN)
    code, printed = convert(folder, "--config", str(config))
    assert code == 2 and "model.num_layers is missing" in printed and printed.endswith("state it by --config FILE")


@pytest.mark.parametrize("tracker", ["4", "../other", ""])
def test_a_tracker_that_names_nothing(tracker: str, tmp_path: Path, convert: Any) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / TRACKER).write_text(tracker)
    code, printed = convert(tmp_path / "saved")
    assert code == 3 and f"{TRACKER} names {tracker!r}" in printed


def test_damage_in_a_weight_is_found(tmp_path: Path, convert: Any) -> None:
    folder = saved(tmp_path / "saved", tiny_model())
    file = max(folder.glob("*/*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    code, printed = convert(folder)
    assert code == 3 and str(file) in printed and "CRC-32" in printed


class WithState(Bomb):
    """One that would be given attributes and items, too."""

    def __reduce__(self) -> Any:
        return *super().__reduce__(), {"x": 1}, iter([1]), iter([(2, 3)])


def test_nothing_in_the_arguments_is_executed(tmp_path: Path) -> None:
    arguments = argparse.Namespace(bomb=WithState(tmp_path / "marker"), dtype=torch.bfloat16, num_layers=2)
    torch.save({"args": arguments, "tensor": torch.ones(3), "class": WithState}, tmp_path / "common.pt")
    with (tmp_path / "common.pt").open("rb") as stream:
        recorded = read_records(stream)
    state = recorded["args"].state
    assert isinstance(recorded["args"], Record)
    assert isinstance(state["bomb"], Record)
    assert state["num_layers"] == 2
    assert not (tmp_path / "marker").exists()


def test_no_more_layers_are_named_than_are_stored(tmp_path: Path) -> None:
    """A table of a few bytes could name any number of them."""
    name = "decoder.layers.mlp.linear_fc2.weight"

    def stack(layers: int, parts: int) -> Any:
        described = SimpleNamespace(size=torch.Size([layers, 4]), chunks=[None] * parts)
        return SimpleNamespace(described={name: described}, meta=lambda *_: torch.empty(4, device="meta"))

    own = [f"decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in range(3)]
    assert list(_unstack_layers(tmp_path, stack(3, 3), [name])) == own
    with pytest.raises(CorruptError, match="of 4 layers in 3 parts"):
        _unstack_layers(tmp_path, stack(4, 3), [name])


def test_a_hybrid_stack_is_attention_and_mlp_in_turn(tmp_path: Path) -> None:
    """Two of its layers are one of ours."""

    def stack(*layers: str) -> tuple[Any, list[str]]:
        names = [f"decoder.layers.{number}.{rest}" for number, rest in enumerate(layers)] + [HYBRID_NORM]
        described = SimpleNamespace(size=torch.Size([4]), chunks=[None])
        meta = lambda *_: torch.empty(4, device="meta")  # noqa: E731
        return SimpleNamespace(described=dict.fromkeys(names, described), meta=meta), names

    attention, mlp = "self_attention.linear_proj.weight", "mlp.linear_fc1.layer_norm_weight"
    norm = "0.pre_mlp_layernorm.weight"
    own = [f"decoder.layers.{name}" for name in (f"0.{attention}", norm, f"1.{attention}")]
    assert list(_unstack_layers(tmp_path, *stack(attention, mlp, attention))) == [*own, OUR_NORM]
    with pytest.raises(InputError, match=r"has decoder\.layers\.1\.mixer\.D: its layers are not attention and MLP"):
        _unstack_layers(tmp_path, *stack(attention, "mixer.D"))
