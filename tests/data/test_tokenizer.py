import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.data import tokenizer as tokenizers
from megatron_fanformer.data.tokenizer import Tokenizer, load_tokenizer, train_sentencepiece
from megatron_fanformer.errors import InputError, MachineTooSlow

EXACT_TEXTS = [
    "",
    "plain",
    "  leading and trailing  ",
    "def f(x):\n\tif x:\n        return   x\n\n\n",
    "\r\n carriage \r\n",
    "\t\t",
    "\0 a\0b",
    "\u2581 a\u2581\u2581b \u2581",
    "<|endoftext|><s></s><unk>",
    "<0x41><0xE2>",
    "\u2047 \ufffd \ufeff \u2585",
    "\u2028\u2029\u0085\u00a0\u3000",
    "e\u0301 \ufb01 \u00c5",
    "\U0001f600\u200d\U0010ffff\ufffe",
]


@pytest.fixture(scope="module")
def small(small_tokenizer_file: Path) -> Tokenizer:
    return load_tokenizer(small_tokenizer_file)


@pytest.fixture(scope="module")
def olmo(olmo_tokenizer_file: Path) -> Tokenizer:
    return load_tokenizer(olmo_tokenizer_file)


@pytest.mark.parametrize("text", EXACT_TEXTS)
def test_a_trained_tokenizer_gives_every_text_back(small: Tokenizer, text: str) -> None:
    assert small.decode(small.encode(text)) == text


def test_a_trained_tokenizer_gives_random_characters_back(small: Tokenizer) -> None:
    draw = random.Random(1)
    for _ in range(2000):
        codes = [draw.choice([32, 9, 10, draw.randrange(0x3000), draw.randrange(0x110000)]) for _ in range(12)]
        text = "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)
        assert small.decode(small.encode(text)) == text


def test_runs_of_spaces_become_pieces(small: Tokenizer) -> None:
    assert len(small.encode("\n        return")) < 8


def test_the_end_of_text_is_never_matched_in_a_text(small: Tokenizer) -> None:
    assert small.eod_id not in small.encode("a<|endoftext|>b")
    assert small.vocab_size == 600  # as asked for


def test_a_batch_is_its_texts_one_by_one(small: Tokenizer, sample_texts: list[str]) -> None:
    assert small.encode_batch(sample_texts[:3]) == [small.encode(text) for text in sample_texts[:3]]


def test_too_little_text_for_the_vocabulary_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tokenizer of 8192 pieces"):
        train_sentencepiece(["too little"], tmp_path / "tokenizer")
    assert list(tmp_path.iterdir()) == []


def test_the_papers_tokenizer_ends_a_text_with_50279(olmo: Tokenizer) -> None:
    assert (olmo.eod_id, olmo.vocab_size) == (50279, 50280)


def test_the_papers_tokenizer_gives_composed_text_back(olmo: Tokenizer, sample_texts: list[str]) -> None:
    text = "\n\n".join(sample_texts) + "\t  <|endoftext|>\r\n"
    assert olmo.decode(olmo.encode(text)) == text


def test_a_text_that_waits_for_a_core_accuses_the_machine(olmo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the tokenizer: what counts against it is the time in which it computed."""
    encoded = type(olmo)._encoded

    def seldom_run(self: Any, texts: list[str]) -> Any:
        time.sleep(0.3)
        return encoded(self, texts)

    ids = olmo.encode("a text")
    monkeypatch.setattr(type(olmo), "_encoded", seldom_run)
    monkeypatch.setattr(tokenizers, "ENCODE_SECONDS", 0.05)
    assert olmo.encode("a text") == ids
    monkeypatch.setattr(tokenizers, "WAIT_FACTOR", 1.0)
    with pytest.raises(
        MachineTooSlow, match=r"got 0\.0 s of CPU time in 0 s; other processes take this machine's cores"
    ):
        olmo.encode("a text")


def test_settings_for_fixed_lengths_in_the_file_do_not_cut_documents(
    olmo_tokenizer_file: Path, olmo: Tokenizer, tmp_path: Path
) -> None:
    file = json.loads(olmo_tokenizer_file.read_text())
    file["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(file))
    assert load_tokenizer(path).encode("word " * 20) == olmo.encode("word " * 20)


def test_a_folder_stands_for_the_tokenizer_it_holds(small_tokenizer_file: Path) -> None:
    assert load_tokenizer(small_tokenizer_file.parent).path == small_tokenizer_file


def test_a_stated_end_of_text_overrides_if_it_is_in_the_vocabulary(small_tokenizer_file: Path) -> None:
    assert load_tokenizer(small_tokenizer_file, eod_id=5).eod_id == 5
    with pytest.raises(InputError, match="eod_id 600"):
        load_tokenizer(small_tokenizer_file, eod_id=600)


def test_a_tokenizer_without_end_of_text_must_be_told_one(olmo_tokenizer_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(olmo_tokenizer_file.read_text().replace("<|endoftext|>", "<|other|>"))
    with pytest.raises(InputError, match="eod_id"):
        load_tokenizer(path)


@pytest.mark.parametrize("name", ["missing.model", "rubbish.model", "rubbish.json", "notes.txt", "empty"])
def test_what_is_no_tokenizer_is_an_input_error_that_names_it(tmp_path: Path, name: str) -> None:
    for rubbish in ("rubbish.model", "rubbish.json", "notes.txt"):
        (tmp_path / rubbish).write_bytes(b"rubbish")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=name):
        load_tokenizer(tmp_path / name)
