"""Random checkpoints of every variant, through every format, against plain PyTorch."""

import dataclasses
from pathlib import Path

import pytest
import torch

from megatron_fanformer.checkpoint.full_tensors import write_full_tensors
from megatron_fanformer.convert.convert import convert_checkpoint
from megatron_fanformer.convert.name_table import expected_shapes
from megatron_fanformer.errors import InputError
from megatron_fanformer.hf import FANformerForCausalLM
from megatron_fanformer.model.config import FANConfig
from megatron_fanformer.runtime.seeding import generator_for
from tests.convert.plain_fanformer import HEADS, VARIANTS, random_weights, write
from tests.plain_model import from_transformers, plain_logits
from tests.tiny import tiny_model
from tests.whole_models import read_full_tensors

# float32 against float64, logits of about 10: seen 2e-5 at most.
SAME_LOGITS = 1e-4
SAMPLES, LENGTH = 2, 16
VOCABULARY = ("transformer.wte.weight", "transformer.ff_out.weight")
ALL = tuple(VARIANTS)
# One of each placement, with grouped queries, an untied head and a vocabulary that no rank count divides among them.
SOME = ("grouped queries", "qk and v, two ratios", "odd padding")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each variant in the authors' layout and, converted, in ours."""
    root = tmp_path_factory.mktemp("variants")
    for name, variant in VARIANTS.items():
        source = write(root / "reference" / name, variant)
        convert_checkpoint(source, root / "megatron" / name, to="megatron", verified=False)
    return root


@pytest.mark.parametrize("name", [*SOME, *(pytest.param(n, marks=pytest.mark.full) for n in ALL if n not in SOME)])
def test_the_receipt_of_every_variant(root: Path, name: str, tmp_path: Path) -> None:
    """On the way to ours and to the authors' format; to Hugging Face it is below."""
    for source, to in (("reference", "megatron"), ("megatron", "reference")):
        if to == "reference" and not VARIANTS[name].bias:
            continue
        convert_checkpoint(root / source / name, tmp_path / to, to=to)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_to_hugging_face_and_back(root: Path, name: str, tmp_path: Path) -> None:
    """Without loss but for the padding; transformers gives the plain model's logits."""
    variant, weights = VARIANTS[name], random_weights(VARIANTS[name])
    ids = torch.randint(variant.tokens, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    convert_checkpoint(root / "reference" / name, tmp_path / "hf", to="hf")
    logits = FANformerForCausalLM.from_pretrained(tmp_path / "hf")(ids).logits
    exact = plain_logits({key: w.double() for key, w in weights.items()}, ids, heads=HEADS, gelu=variant.gelu)
    assert (logits.double() - exact[..., : variant.tokens]).abs().max() < SAME_LOGITS
    if not variant.bias:
        with pytest.raises(InputError, match="has FAN maps without a bias, which the authors' format cannot express"):
            convert_checkpoint(tmp_path / "hf", tmp_path / "back", to="reference", verified=False)
        return
    convert_checkpoint(tmp_path / "hf", tmp_path / "back", to="reference", verified=False)
    back, rows = torch.load(tmp_path / "back" / "model.pt"), dict.fromkeys(VOCABULARY, variant.tokens)
    assert back.keys() == weights.keys()
    assert [key for key in back if not torch.equal(back[key][: rows.get(key)], weights[key][: rows.get(key)])] == []


# -- FAN layers in place of the MLP


FFN_MODEL = tiny_model(seq_length=32, fan=FANConfig(placement="ffn", activation="gelu"))


def test_fan_layers_to_hugging_face_and_back(tmp_path: Path) -> None:
    """The receipt holds the trainer's logits against the export's, and the plain model both."""
    shapes = expected_shapes(FFN_MODEL, "megatron")
    tensors = {name: 0.3 * torch.randn(shape, generator=generator_for(0, name)) for name, shape in shapes.items()}
    write_full_tensors(tmp_path / "run", tensors, {"model": dataclasses.asdict(FFN_MODEL)}, {})
    convert_checkpoint(tmp_path / "run", tmp_path / "hf", to="hf")
    model = FANformerForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(1))
    exact = {name: weight.double() for name, weight in from_transformers(model.state_dict()).items()}
    assert (model(ids).logits - plain_logits(exact, ids, heads=4, gelu=True)).abs().max() < 1e-4
    convert_checkpoint(tmp_path / "hf", tmp_path / "back", to="megatron", verified=False)
    back = read_full_tensors(tmp_path / "back" / "checkpoints" / "step-00000000")
    ids_alone = {name: FFN_MODEL.vocab_size for name in tensors if "embeddings" in name or "output" in name}
    same = [torch.equal(back[name][: ids_alone.get(name)], tensors[name][: ids_alone.get(name)]) for name in tensors]
    assert all(same)
    with pytest.raises(InputError, match="which the authors' format cannot express; convert it to hf or megatron"):
        convert_checkpoint(tmp_path / "run", tmp_path / "reference", to="reference")
