import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Library
from transformers import AutoTokenizer, GenerationConfig

from megatron_fanformer.data.tokenizer import Tokenizer, load_tokenizer, train_sentencepiece
from megatron_fanformer.errors import InputError

EXACT_TEXTS = [
    *("", "plain", "  leading and trailing  ", "\r\n carriage \r\n", "\t\t", "\0 a\0b", "\u2581 a\u2581\u2581b \u2581"),
    *("def f(x):\n\tif x:\n        return   x\n\n\n", "<|endoftext|><s></s><unk>", "<0x41><0xE2>"),
    *("\u2047 \ufffd \ufeff \u2585", "\u2028\u2029\u0085\u00a0\u3000", "e\u0301 \ufb01 \u00c5"),
    "\U0001f600\u200d\U0010ffff\ufffe",
]


@pytest.fixture(scope="module")
def small(small_tokenizer_file: Path) -> Tokenizer:
    return load_tokenizer(small_tokenizer_file)


@pytest.fixture(scope="module")
def olmo(olmo_tokenizer_file: Path) -> Tokenizer:
    return load_tokenizer(olmo_tokenizer_file)


def test_a_trained_tokenizer_gives_every_text_back(small: Tokenizer) -> None:
    draw, texts = random.Random(1), list(EXACT_TEXTS)
    for _ in range(2000):
        codes = [draw.choice([32, 9, 10, draw.randrange(0x3000), draw.randrange(0x110000)]) for _ in range(12)]
        texts.append("".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000))
    assert [small.decode(small.encode(text)) for text in texts] == texts


def test_the_end_of_text_is_never_matched_in_a_text(small: Tokenizer) -> None:
    assert small.eod_id not in small.encode("a<|endoftext|>b")
    assert small.vocab_size == 600  # as asked for


def test_too_little_text_for_the_vocabulary_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tokenizer of 8192 pieces"):
        train_sentencepiece(["too little"], tmp_path / "tokenizer")
    assert list(tmp_path.iterdir()) == []


def test_settings_for_fixed_lengths_in_the_file_do_not_cut_documents(
    olmo_tokenizer_file: Path, olmo: Tokenizer, tmp_path: Path
) -> None:
    file = json.loads(olmo_tokenizer_file.read_text())
    file["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(file))
    assert load_tokenizer(path).encode("word " * 20) == olmo.encode("word " * 20)


def test_a_stated_end_of_text_overrides_if_it_is_in_the_vocabulary(small_tokenizer_file: Path) -> None:
    assert load_tokenizer(small_tokenizer_file, eod_id=5).eod_id == 5
    with pytest.raises(InputError, match="end-of-text id 600"):
        load_tokenizer(small_tokenizer_file, eod_id=600)


def transformers_end(folder: Path) -> int:
    """As transformers has it: a tokenizer's, else its model's."""
    own = AutoTokenizer.from_pretrained(folder).eos_token_id
    return GenerationConfig.from_pretrained(folder).eos_token_id if own is None else own


@pytest.mark.parametrize(
    ("beside", "source"),
    [
        ({"tokenizer_config.json": {"eos_token": "<eos>"}}, "tokenizer_config.json"),
        ({"tokenizer_config.json": {"eos_token": {"content": "c"}}}, "tokenizer_config.json"),
        ({"tokenizer_config.json": {}, "generation_config.json": {"eos_token_id": 5}}, "generation_config.json"),
        ({"generation_config.json": {"eos_token_id": [4, 1]}}, "generation_config.json"),
    ],
)
def test_a_text_ends_as_the_files_beside_a_tokenizer_say(
    tmp_path: Path, beside: dict[str, dict[str, Any]], source: str
) -> None:
    write_gemmas(tmp_path / "tokenizer.json")
    for name, content in {"tokenizer_config.json": {}, **beside}.items():
        fields = {"tokenizer_class": "PreTrainedTokenizerFast"} if name.startswith("tok") else {}
        if isinstance(content.get("eos_token"), dict):
            fields["eos_token"] = {"__type": "AddedToken", **content["eos_token"]}
        (tmp_path / name).write_text(json.dumps(content | fields))
    tokenizer, theirs = load_tokenizer(tmp_path), transformers_end(tmp_path)
    assert tokenizer.eod_id == (theirs[0] if isinstance(theirs, list) else theirs)
    assert tokenizer.eod_source == source
    assert load_tokenizer(tmp_path, eod_id=6).eod_id == 6


def write_gemmas(path: Path, special: tuple[str, ...] = ("<pad>", "<eos>")) -> None:
    """A tokenizer in which `</s>` is an HTML tag, as in Gemma's."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "<s>": 2, "</s>": 3, "a": 4, "b": 5, "c": 6}
    library = Library(models.BPE(vocab=vocabulary, merges=[]))
    library.add_special_tokens(list(special))
    library.add_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    library.save(str(path))


def test_only_a_special_piece_ends_a_text_by_its_name(tmp_path: Path) -> None:
    write_gemmas(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eod_id, tokenizer.eod_source) == (1, None)
    write_gemmas(tmp_path / "tokenizer.json", special=("<pad>",))
    with pytest.raises(InputError, match=r"--eod-id .*0 <pad>"):
        load_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path, needs_eod=False).eod_id == -1


def test_only_a_control_piece_of_sentencepiece_ends_a_text_by_its_name(tmp_path: Path, sample_texts: list[str]) -> None:
    """As in Gemma's model, where `</s>` is a user's piece, which a text may contain."""
    with (tmp_path / "tokenizer.model").open("wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample_texts),
            model_writer=stream,
            vocab_size=500,
            hard_vocab_limit=False,
            eos_piece="<eos>",
            bos_piece="<bos>",
            user_defined_symbols=["</s>"],
            minloglevel=2,
        )
    own = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert own.piece_to_id("</s>") in own.encode("a</s>")
    assert load_tokenizer(tmp_path).eod_id == own.eos_id()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<bos>"}')
    assert load_tokenizer(tmp_path).eod_id == own.bos_id()


@pytest.mark.parametrize("name", ["missing.model", "rubbish.model", "rubbish.json", "notes.txt", "empty"])
def test_what_is_no_tokenizer_is_an_input_error_that_names_it(tmp_path: Path, name: str) -> None:
    for rubbish in ("rubbish.model", "rubbish.json", "notes.txt"):
        (tmp_path / rubbish).write_bytes(b"rubbish")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=name):
        load_tokenizer(tmp_path / name)
