"""The receipt: what it says, and that it catches a fault planted in any of the transforms."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megatron_fanformer.cli import main
from megatron_fanformer.convert import name_table
from megatron_fanformer.convert.checkpoints import open_checkpoint
from megatron_fanformer.convert.convert import convert_checkpoint
from megatron_fanformer.convert.name_table import Transform, _swap_halves
from megatron_fanformer.convert.receipt import different_tensors, prompts
from megatron_fanformer.hf import FANformerForCausalLM
from tests.conftest import REFERENCE
from tests.convert.plain_fanformer import HEAD_SIZE, HIDDEN, VARIANTS, Variant, random_weights, write
from tests.whole_models import logits_bound

AUTHORS_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("d_model", "n_heads", "n_layers", "max_sequence_length", "vocab_size", "rope_theta"), int),
    **dict.fromkeys(("n_kv_heads", "mlp_hidden_size", "embedding_size"), int | None),
    **dict.fromkeys(("eos_token_id", "pad_token_id", "block_group_size"), int),
    **dict.fromkeys(("attention_dropout", "residual_dropout", "embedding_dropout", "layer_norm_eps", "p_ratio"), float),
    **dict.fromkeys(("block_type", "layer_norm_type", "activation_type", "init_fn"), str),
    **dict.fromkeys(("alibi", "rope", "attention_layer_norm", "embedding_layer_norm", "norm_after"), bool),
    **dict.fromkeys(("layer_norm_with_affine", "attention_layer_norm_with_affine", "include_bias"), bool),
    **dict.fromkeys(("weight_tying", "scale_logits"), bool),
    **dict.fromkeys(("bias_for_layer_norm", "use_ATF"), bool | None),
    "clip_qkv": float | None,
    "attention_activation": str | None,
}
"""The fields of the authors' `ModelConfig` (olmo/config.py) that are written, with their types."""

FORMS = ("reference", "megatron", "hf")
CASES = ("atl", "fanformer-tied", "fanformer-untied-p0125", "transformer-tied")
OTHER_CASES = ("fanformer-tied", "atl")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", VARIANTS["grouped queries"])


def check_the_authors_code_opens(folder: Path, weights: dict[str, torch.Tensor], tokens: int) -> None:
    """By the steps of `OLMo.from_checkpoint` and of their trainer's `load_state_dict`.

    The first reads `model.pt` alone; the second takes any `model.safetensors` for the form of its own. Their fields are
    typed, and an unknown one is an error. `weights` are those of their own model, by the names of its state, whose
    padding beyond `tokens` was lost on the way.
    """
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "model.pt", "receipt.json"]
    fields = yaml.safe_load((folder / "config.yaml").read_text())["model"]
    assert [name for name, value in fields.items() if not isinstance(value, AUTHORS_FIELDS[name])] == []
    state = torch.load(folder / "model.pt", map_location="cpu")
    assert state.keys() == weights.keys()  # as a strict `load_state_dict` asks
    rows = {"transformer.wte.weight": tokens, "transformer.ff_out.weight": tokens}
    for name, loaded in state.items():
        assert loaded.shape == weights[name].shape
        assert torch.equal(loaded[: rows.get(name)], weights[name][: rows.get(name)]), name


# -- what a conversion does


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.full if c in OTHER_CASES else ()) for c in CASES])
def test_the_authors_cases_all_the_way_round(case: str, tmp_path: Path) -> None:
    """Reference, Megatron, Hugging Face, Megatron, reference."""
    expected = load_file(REFERENCE / case / "expected.safetensors")
    steps = [REFERENCE / case, *(tmp_path / name for name in ("megatron", "hf", "megatron2", "reference"))]
    for before, after in itertools.pairwise(steps):
        convert_checkpoint(before, after, to=after.name.removesuffix("2"))  # type: ignore[arg-type]
    tokens = open_checkpoint(tmp_path / "hf").config.vocab_size
    check_the_authors_code_opens(steps[-1], load_file(steps[0] / "model.safetensors"), tokens)
    with torch.no_grad():
        logits = FANformerForCausalLM.from_pretrained(tmp_path / "hf")(expected["input_ids"]).logits
    assert (logits - expected["logits"][..., :tokens]).abs().max() < logits_bound(REFERENCE / case)


@pytest.mark.parametrize("to", FORMS)
def test_the_receipt_is_in_the_new_folder(to: str, source: Path, tmp_path: Path) -> None:
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", to]) == 0
    receipt = json.loads((tmp_path / "out" / "receipt.json").read_text())
    checks = receipt["checks"]
    assert checks["problem"] == "" and checks["logits_max_abs_error"] <= checks["logits_allowed"]
    hashed = receipt["source"]["files"]["model.safetensors"]["sha256"]
    assert hashed == hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    assert receipt["destination"]["files"] and receipt["versions"]["torch"] == metadata.version("torch")


# -- planted faults


def _rolled(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.roll(1, 0) for tensor in tensors)


def _one_heads_q_and_k_exchanged(parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    q, k, *others = (part.clone() for part in parts)
    q[:HEAD_SIZE], k[:HEAD_SIZE] = k[:HEAD_SIZE].clone(), q[:HEAD_SIZE].clone()
    return q, k, *others


def _stacked_exchange(parts: tuple[torch.Tensor, ...], variant: Variant) -> tuple[torch.Tensor, ...]:
    q, rest = parts[0][:HIDDEN], parts[0][HIDDEN:]
    k, others = rest[: variant.value_size], rest[variant.value_size :]
    return (torch.cat([*_one_heads_q_and_k_exchanged((q, k)), others]),)


GROUPED, QK_AND_V = VARIANTS["grouped queries"], VARIANTS["qk and v, two ratios"]
# The transform's name in the module, the variant, the destination, and what its parts become.
FAULTS: dict[str, tuple[str, Variant, str, Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]]] = {
    "halves swapped, hf": ("GATE_UP_SEPARATE", GROUPED, "hf", lambda parts: parts[::-1]),
    "halves swapped, reference": ("GATE_UP_SWAPPED", GROUPED, "reference", lambda parts: (_swap_halves(parts[0]),)),
    "q and k of a head, hf": ("QKV_SEPARATE", GROUPED, "hf", _one_heads_q_and_k_exchanged),
    "q and k of a head, qk_and_v": ("QK_SEPARATE", QK_AND_V, "hf", _one_heads_q_and_k_exchanged),
    "q and k of a head, reference": ("QKV_STACKED", GROUPED, "reference", partial(_stacked_exchange, variant=GROUPED)),
    "q and k stacked, reference": ("QK_STACKED", QK_AND_V, "reference", partial(_stacked_exchange, variant=QK_AND_V)),
    "p off by one row, hf": ("FAN_ROWS", GROUPED, "hf", _rolled),
    "p off by one row, reference": ("FAN_ROWS", GROUPED, "reference", _rolled),
}


Plant = Callable[..., None]


@pytest.fixture
def plant() -> Iterator[Plant]:
    """`plant(name, split=…, join=…)` changes a transform: the object itself, which the table holds; it is frozen."""
    before: list[tuple[Transform, str, object]] = []

    def change(name: str, **functions: object) -> None:
        transform: Transform = getattr(name_table, name)
        for field, function in functions.items():
            before.append((transform, field, getattr(transform, field)))
            object.__setattr__(transform, field, function)

    yield change
    for transform, field, function in before:
        object.__setattr__(transform, field, function)


def refused(source: Path, tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the message where a conversion fails its checks."""
    out = tmp_path / "out"
    assert main(["convert", str(source), str(out), "--to", to]) == 3
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def started_from(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Variant], Path]:
    """A source in Megatron's form: the fault is in one format alone then (the same in two cancels, and rightly)."""

    @cache
    def source(variant: Variant) -> Path:
        folder = tmp_path_factory.mktemp("sources")
        reference = write(folder / "reference", variant)
        convert_checkpoint(reference, folder / "megatron", to="megatron", verified=False)
        return folder / "megatron"

    return source


@pytest.mark.parametrize(
    ("fault", "directions"), [*((fault, "both") for fault in FAULTS), ("p off by one row, reference", "one")]
)
def test_a_fault_in_a_transform_is_caught(
    fault: str,
    directions: str,
    started_from: Callable[[Variant], Path],
    tmp_path: Path,
    plant: Plant,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one direction the round trip shows it; in both, where it cancels, the logits."""
    name, variant, to, change = FAULTS[fault]
    source = started_from(variant)
    transform: Transform = getattr(name_table, name)
    split, join = transform.split, transform.join
    undo = change if name != "FAN_ROWS" else lambda parts: tuple(part.roll(-1, 0) for part in parts)
    plant(name, split=lambda hub, config: split(hub, config) if hub.is_meta else change(split(hub, config)))
    if directions == "both":
        plant(name, join=lambda parts, config: join(undo(tuple(parts)), config))
    message = refused(source, tmp_path, to, capsys)
    assert ("logits differ" if directions == "both" else "converted back, tensors are different: ") in message


def test_a_row_of_padding_too_many_is_caught(
    source: Path, tmp_path: Path, plant: Plant, capsys: pytest.CaptureFixture[str]
) -> None:
    convert_checkpoint(source, tmp_path / "hf", to="hf", verified=False)
    rows = 128 + 1
    plant("VOCABULARY_PADDED", split=lambda hub, _: (name_table.resize_vocabulary(hub, rows),))
    message = refused(tmp_path / "hf", tmp_path, "megatron", capsys)
    assert "shape [128, 32], but the stored tensor has shape [129, 32]" in message


def test_weights_that_are_not_finite_do_not_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = random_weights(GROUPED)
    weights["transformer.blocks.1.ff_out.weight"][0, 0] = float("nan")
    assert "logits differ by nan" in refused(write(tmp_path / "source", GROUPED, weights), tmp_path, "hf", capsys)


def test_the_faults_cover_every_transform_that_moves_rows() -> None:
    named = {name for name, value in vars(name_table).items() if isinstance(value, Transform)}
    planted = {name for name, *_ in FAULTS.values()} | {"VOCABULARY_TRIMMED", "VOCABULARY_PADDED"}
    assert named - planted == {"IDENTITY"}


def test_a_changed_row_of_a_token_that_no_prompt_has_is_caught(source: Path, tmp_path: Path) -> None:
    """The logits cannot tell."""
    convert_checkpoint(source, tmp_path / "hf", to="hf", verified=False)
    before, file = open_checkpoint(source), tmp_path / "hf" / "model.safetensors"
    assert different_tensors(before, open_checkpoint(tmp_path / "hf"), None) == []
    weights = load_file(file)
    unseen = min(set(range(90)).difference(prompts(90).flatten().tolist()))
    weights["model.embed_tokens.weight"][unseen] += 1
    save_file(weights, file, {"format": "pt"})
    assert different_tensors(before, open_checkpoint(tmp_path / "hf"), None) == ["transformer.wte.weight"]
