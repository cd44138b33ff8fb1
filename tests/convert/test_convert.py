"""What `convert` is asked for besides the weights: types, tokenizers, templates, and where it writes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.cli import main
from megatron_fanformer.convert.convert import convert_checkpoint
from megatron_fanformer.convert.huggingface import from_huggingface_config, to_huggingface_config
from megatron_fanformer.convert.recognition import find_checkpoint
from megatron_fanformer.data.chat_template import find_template
from megatron_fanformer.model.config import FANConfig, FANformerConfig
from megatron_fanformer.model.rope_scaling import RopeScalingConfig
from tests.conftest import REFERENCE
from tests.convert.plain_fanformer import VARIANTS, write
from tests.generate.making import write_tokenizer

VARIANT = VARIANTS["grouped queries"]
VOCAB_SIZE = 90


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", VARIANT)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer").mkdir()
    return Path(write_tokenizer(tmp_path / "tokenizer", VOCAB_SIZE))


def converted(source: Path, to: Any, **options: Any) -> Path:
    """The folder, which is not verified: `test_receipt.py` does that."""
    destination = source.with_name(f"to {to}")
    convert_checkpoint(source, destination, to=to, verified=False, **options)
    return destination


def stated(file: Path) -> Any:
    return json.loads(file.read_text())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_states_the_type_of_its_weights(dtype: str, source: Path) -> None:
    checkpoint = find_checkpoint(converted(source, "megatron", dtype=dtype))
    assert run_folder.saved_config(checkpoint)["precision"] == {"dtype": dtype}


@pytest.mark.parametrize("to", ["hf", "reference"])
def test_the_sources_own_end_of_text_stays(to: str, source: Path, tokenizer: Path) -> None:
    """Unless another tokenizer, or another id, is stated; also by way of a checkpoint of ours."""
    first = converted(source, "hf", tokenizer=tokenizer, eod_id=7).rename(source.with_name("first"))
    ours = converted(first, "megatron").rename(source.with_name("ours"))

    def end(start: Path = first, **options: Any) -> Any:
        folder = converted(start, to, **options)
        if to == "hf":
            found = stated(folder / "config.json")["eos_token_id"]
        else:
            found = yaml.safe_load((folder / "config.yaml").read_text())["model"]["eos_token_id"]
        shutil.rmtree(folder)
        return found

    assert [end(), end(eod_id=8), end(tokenizer=tokenizer)] == [7, 8, 0]
    assert [end(ours), end(ours, eod_id=8), end(ours, tokenizer=tokenizer)] == [7, 8, 0]
    again = converted(ours, "megatron", eod_id=9).rename(source.with_name("again"))
    assert end(again) == 9


def test_the_authors_end_of_text_stays(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    convert_checkpoint(REFERENCE / "fanformer-tied", folder, to="hf", verified=False)
    assert stated(folder / "config.json")["eos_token_id"] == 249


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--to megatron --tokenizer {0}/tokenizer_config.json", "cannot be read as a Hugging Face tokenizer.json"),
        ("--to megatron --tokenizer {0}/characters-300.json", "has 300 ids, the model's vocabulary "),
        ("--to hf --tokenizer {0}/characters-300.json", "has 300 ids, the model's vocabulary "),
        ("--to reference --tokenizer {0}/characters-300.json", "has 300 ids, the model's vocabulary "),
        ("--to megatron --eod-id 5", "--eod-id 5 has no effect with --to megatron"),
        ("--to hf --eod-id 99999", "--eod-id 99999 is outside the model's vocabulary; state one of [0, "),
        ("--to reference --eod-id -1", "--eod-id -1 is outside the model's vocabulary; state one of [0, "),
    ],
)
def test_a_tokenizer_or_an_end_of_text_that_does_not_fit_is_refused(
    options: str, message: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "tokenizer").mkdir()
    (folder / "tokenizer_config.json").write_text("{}")
    write_tokenizer(folder, 300)
    assert main(["convert", str(source), str(tmp_path / "out"), *options.format(folder).split(), "--no-verify"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and sorted(path.name for path in tmp_path.iterdir()) == ["source", "tokenizer"]


def test_the_template_beside_a_stated_tokenizer_comes_before_the_sources_own(source: Path, tokenizer: Path) -> None:
    (source / "chat_template.jinja").write_text("the source's")
    shutil.copy(tokenizer, source / "tokenizer.json")
    assert (converted(source, "hf") / "chat_template.jinja").read_text() == "the source's"
    (tokenizer.parent / "chat_template.jinja").write_text("the tokenizer's")
    checkpoint = find_checkpoint(converted(source, "megatron", tokenizer=tokenizer))
    assert (checkpoint / "chat_template.jinja").read_text() == "the tokenizer's"


def test_a_template_keeps_the_special_tokens_that_it_had(source: Path, tokenizer: Path) -> None:
    """However often it is converted, and whatever ends a text there: what is written has two of them at most."""
    template = "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    config = {"bos_token": {"content": "a"}, "eos_token": "b", "pad_token": "c", "chat_template": template}
    (tokenizer.parent / "tokenizer_config.json").write_text(json.dumps(config))
    (tokenizer.parent / "chat_template.jinja").write_text(template)
    first = converted(source, "megatron", tokenizer=tokenizer).rename(source.with_name("first"))
    folders = [first, converted(first, "hf", eod_id=7).rename(source.with_name("second"))]
    folders.append(converted(folders[1], "megatron").rename(source.with_name("third")))
    shutil.copy(tokenizer, source / "tokenizer.json")  # and from a folder of somebody else's
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    for to in ("hf", "megatron"):
        folders.append(converted(source, to).rename(source.with_name(f"other {to}")))
    for folder in folders:
        found = find_template(folder if (folder / "config.json").exists() else find_checkpoint(folder), eod_id=7)
        assert found.render([{"role": "user", "content": "Hi"}]).text == "aHib"
        assert found.source == f'{{% set bos_token = "a" %}}\n{{% set eos_token = "b" %}}\n{template}'


def test_every_field_of_a_model_comes_back_from_transformers_configuration() -> None:
    model = FANformerConfig(
        num_layers=3,
        hidden_size=48,
        ffn_hidden_size=80,
        num_attention_heads=6,
        num_query_groups=2,
        vocab_size=256,
        seq_length=40,
        rotary_base=500_000,
        rope_scaling=RopeScalingConfig(rope_type="yarn", factor=8, original_max_position_embeddings=5, mscale=0.7),
        layernorm_epsilon=3e-5,
        untie_embeddings_and_output_weights=True,
        fan=FANConfig(p_ratio=0.125, activation="gelu", bias=False, placement="qk_and_v", v_p_ratio=0.375),
    )
    assert from_huggingface_config(to_huggingface_config(model)) == model


def test_parts_of_one_tensor_in_different_formats_get_the_wider(source: Path, tmp_path: Path) -> None:
    mixed = converted(source, "hf")
    weights = load_file(mixed / "model.safetensors")
    name = "model.layers.0.self_attn.v_proj.weight"
    save_file({**weights, name: weights[name].bfloat16()}, mixed / "model.safetensors")
    assert main(["convert", str(mixed), str(tmp_path / "out"), "--to", "megatron"]) == 0
