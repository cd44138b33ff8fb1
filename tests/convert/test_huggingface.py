"""Exported folders: what is in them, who can open them, and that tokenizers give the same ids."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from megatron_fanformer.convert import tokenizer_files
from megatron_fanformer.convert.model_card import Extras
from megatron_fanformer.convert.name_table import expected_shapes
from megatron_fanformer.data.chat_template import encode_chat, find_template
from megatron_fanformer.data.tokenizer import load_tokenizer, train_sentencepiece
from megatron_fanformer.errors import InputError
from megatron_fanformer.hf import FANformerForCausalLM
from megatron_fanformer.model.config import FANConfig
from tests.small_runs import ROOT
from tests.tiny import tiny_model
from tests.whole_models import export_huggingface, read_huggingface

OLMO_TOKENIZER = ROOT / "tests" / "samples" / "tokenizers" / "allenai_gpt-neox-olmo-dolma-v1_5.json"
SMALL = tiny_model(
    num_query_groups=2,
    vocab_size=600,
    seq_length=64,
    untie_embeddings_and_output_weights=True,
    fan=FANConfig(p_ratio=0.2, activation="gelu"),
)
# What a stranger runs: nothing of ours can be imported, nothing can be fetched, nobody answers a prompt. The
# tokenizer needs no code of the folder's. A line a folder.
STRANGER = """
import sys
sys.modules["megatron_fanformer"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:]:
    trusting = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    ids = tokenizer("def f(x):\\n    return", return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=6, do_sample=False)
    assert trusting("def f(x):\\n    return").input_ids == ids.input_ids[0].tolist()
    print(type(model).__name__, ids.input_ids.tolist(), out[0].tolist(), sep="|")
"""
# And what the first folder's model card gives them to type, with the folder in the place of its name.
CARD_READER = """
from pathlib import Path
code = Path(sys.argv[1], "README.md").read_text().split("```python\\n")[1].split("```")[0]
assert code.count('"model"') == 2
exec(code.replace('"model"', repr(sys.argv[1])))
batch = tokenizer(["x", "def f(x):"], padding=True, return_tensors="pt")
assert batch.attention_mask[0].tolist()[0] == 0 and "token_type_ids" not in batch
model.generate(**batch, max_new_tokens=2)
"""
# What a user of the installed package runs: one import more, and no flag.
FRIEND = """
del sys.modules["megatron_fanformer"]
import megatron_fanformer.hf
from transformers import AutoModel
for auto in (AutoModel, AutoModelForCausalLM):
    print(type(auto.from_pretrained(sys.argv[1])).__module__)
"""


def random_model(config=SMALL):
    generator = torch.Generator().manual_seed(0)
    shapes = expected_shapes(config, "megatron")
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def run_python(code, *folders, tmp_path):
    """What `code` prints in a fresh process and an empty folder; this package can be imported, if `code` does."""
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HF_"))},
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
    }
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, folders)],
        cwd=elsewhere,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def training_texts():
    files = sorted((ROOT / "megatron_fanformer").rglob("*.py"))
    return [file.read_text(encoding="utf-8") for file in files]


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    return train_sentencepiece(training_texts(), tmp_path_factory.mktemp("tokenizer") / "bpe", vocab_size=600)


@pytest.fixture(scope="module")
def exported(sentencepiece_model, tmp_path_factory):
    """A random model with a sentencepiece tokenizer; end of text is its piece 1."""
    folder = tmp_path_factory.mktemp("export") / "model"
    export_huggingface(SMALL, random_model(), folder, dtype=torch.float32, tokenizer=sentencepiece_model)
    return folder


@pytest.mark.parametrize("kind", ["sentencepiece", "json"])
def test_transformers_gives_a_chat_the_ids_that_it_is_trained_on(kind, sentencepiece_model, tmp_path):
    """Also where another program's tokenizer states another end of text."""
    source = sentencepiece_model if kind == "sentencepiece" else OLMO_TOKENIZER
    original, template = load_tokenizer(source), find_template(source, "olmo")
    extras = Extras(name="", tokenizer=source, chat_template=template.standalone_source())
    tokenizer_files.write_tokenizer(tmp_path, extras, model_max_length=64)
    written = PreTrainedTokenizerFast.from_pretrained(tmp_path, eos_token="<unk>")
    texts = ("", "Größe 北京 🙂\n", "two  <|endoftext|>\u2581", "{% if %}")
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    wanted, _ = encode_chat(original, template.render(messages, add_generation_prompt=True))
    assert written.apply_chat_template(messages, add_generation_prompt=True).input_ids == wanted.tolist()
    text = "plain <|endoftext|> text"
    assert written(text, split_special_tokens=kind == "sentencepiece").input_ids == original.encode(text)


def test_a_stranger_opens_it_and_generates_what_we_do(exported, sentencepiece_model, tmp_path):
    """So does who opens a copy that transformers saved; the model card's code runs; our package needs no flag.

    All in one process: each takes seconds to import transformers.
    """
    copy = tmp_path / "saved"
    AutoModelForCausalLM.from_pretrained(exported).save_pretrained(copy)
    AutoTokenizer.from_pretrained(exported).save_pretrained(copy)
    prompt = load_tokenizer(sentencepiece_model).encode("def f(x):\n    return")
    model = FANformerForCausalLM.from_pretrained(exported)
    ours = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0].tolist()
    shown = run_python(STRANGER + CARD_READER + FRIEND, exported, copy, tmp_path=tmp_path)
    *lines, text = shown.split("\n", 2)
    expected = f"FANformerForCausalLM|{[prompt]}|{ours}"
    assert lines == [expected, expected] and text.startswith("Once upon a time")
    for name in ("configuration_fanformer.py", "modeling_fanformer.py"):
        assert (exported / name).read_bytes() == (ROOT / "megatron_fanformer" / "hf" / name).read_bytes()
    assert text.splitlines()[-2:] == ["megatron_fanformer.hf.modeling_fanformer"] * 2


def test_large_models_are_written_in_shards(tmp_path):
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    export_huggingface(SMALL, random_model(), whole, dtype=torch.float32)
    export_huggingface(SMALL, random_model(), sharded, dtype=torch.float32, max_shard_size="50KB")
    left, right = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (whole, sharded))
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
    assert read_huggingface(sharded)[1].keys() == read_huggingface(whole)[1].keys()


@pytest.mark.parametrize(
    ("end", "ids"),
    [("<|im_end|>", [2, 4]), ("<|part|><|im_end|>", [2, 4]), ("<|endoftext|>", 2), ("no token", 2), ("", 2)],
)
def test_generation_ends_where_the_template_ends_an_answer(tmp_path, end, ids):
    library = Tokenizer(WordLevel({"An answer!": 0, "no token": 1}, "no token"))
    library.add_special_tokens(["<|endoftext|>", "<|part|>", "<|im_end|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role + ':' + m.content }}" + end + "\n{% endfor %}"
    files = {"tokenizer": tmp_path / "tokenizer.json", "chat_template": template}
    export_huggingface(SMALL, random_model(), tmp_path / "out", dtype=torch.float32, **files)
    model = FANformerForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == ids and model.config.eos_token_id == 2
    said = model.generate(torch.tensor([[0]]), max_new_tokens=3, prefix_allowed_tokens_fn=lambda *_: [4])
    assert said.shape[1] == (2 if ids == [2, 4] else 4)


def test_a_sentencepiece_model_gives_the_same_ids(exported, sentencepiece_model):
    """On files it was not trained on and on random strings of white space, code, rare characters."""
    ours, theirs, draw = load_tokenizer(sentencepiece_model), AutoTokenizer.from_pretrained(exported), random.Random(0)
    texts = [Path(module.__file__).read_text() for module in (json, random, shutil)]
    texts += ["".join(draw.choices("ab \n\t\u2581=-_.é北🙂\x00(){}0", k=40)) for _ in range(300)]
    texts += ["".join(draw.choice("ab -=\n") * draw.randint(1, 9) for _ in range(8)) for _ in range(300)]
    assert [text for text in texts if theirs.encode(text) != ours.encode(text)] == []
    assert (exported / "tokenizer.model").read_bytes() == sentencepiece_model.read_bytes()


@pytest.mark.parametrize("is_sequence", [True, False])
def test_special_tokens_around_a_text_are_left_out(is_sequence, tmp_path):
    """As of Llama 3's tokenizer: the model has not learned from them."""
    content = json.loads(OLMO_TOKENIZER.read_text())
    template = TemplateProcessing(single="<|padding|> $A", special_tokens=[("<|padding|>", 1)])
    parts = [content["post_processor"], json.loads(template.__getstate__())]
    content["post_processor"] = {"type": "Sequence", "processors": parts} if is_sequence else parts[1]
    (source := tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.from_file(str(source)).encode("a").ids[0] == 1
    (folder := tmp_path / "out").mkdir()
    tokenizer_files.write_tokenizer(folder, Extras(name="", tokenizer=source), model_max_length=64)
    left = json.loads((folder / "tokenizer.json").read_text())
    assert left == {**content, "post_processor": {"type": "Sequence", "processors": parts[:1]} if is_sequence else None}
    ours, theirs = load_tokenizer(source), PreTrainedTokenizerFast.from_pretrained(folder)
    assert [t for t in training_texts()[:10] if theirs(t).input_ids != ours.encode(t)] == []
    assert tokenizer_files.adds_special_tokens(source)
    assert not tokenizer_files.adds_special_tokens(folder / "tokenizer.json")


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "unigram"},
        {"byte_fallback": False},
        {"normalization_rule_name": "nmt_nfkc"},
        {"add_dummy_prefix": True},
        {"remove_extra_whitespaces": True},
    ],
)
def test_a_sentencepiece_model_without_an_equal_is_refused(settings, tmp_path):
    exact = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
    exact |= {"add_dummy_prefix": False, "remove_extra_whitespaces": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(training_texts()[:30]),
        model_prefix=str(tmp_path / "plain"),
        vocab_size=500,
        max_sentence_length=1_000_000,
        minloglevel=2,
        **exact | settings,
    )
    files = {"tokenizer": tmp_path / "plain.model", "eod_id": 0}
    with pytest.raises(InputError, match="has no exact equivalent"):
        export_huggingface(SMALL, random_model(), tmp_path / "out", dtype=torch.float32, **files)
    assert not (tmp_path / "out").exists()


def edited_copy(exported, tmp_path, **fields):
    folder = tmp_path / "edited"
    shutil.copytree(exported, folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"p_ratio": 0.7}, r"p_ratio 0\.7 must lie in"),
        ({"rope_parameters": {"rope_theta": 10_000.5}}, "must be a whole number"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "with rope_type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 8}}, "with beta_fast; rope_type"),
        ({"id2label": 7}, "cannot be built"),
        ({"model_type": "llama"}, "not .fanformer."),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(fields, message, exported, tmp_path):
    with pytest.raises(InputError, match=message):
        read_huggingface(edited_copy(exported, tmp_path, **fields))


def test_an_export_of_before_rope_parameters_is_the_same_model(exported, tmp_path):
    folder = edited_copy(exported, tmp_path, rope_theta=500.0, rope_scaling={"rope_type": "linear", "factor": 2.0})
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config))
    read = read_huggingface(folder)[0]
    assert (read.rotary_base, read.rope_scaling.rope_type, read.rope_scaling.factor) == (500, "linear", 2.0)
