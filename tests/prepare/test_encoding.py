import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fanformer.data.manifest import Settings, TokenizerRecord
from megatron_fanformer.data.token_files import read_index
from megatron_fanformer.data.tokenizer import SPACE_MARK, Tokenizer, load_tokenizer
from megatron_fanformer.errors import CorruptError, FanformerError, InputError
from megatron_fanformer.prepare import encoding
from megatron_fanformer.prepare.encoding import SMALL_INPUT, EncoderChoice, Gigatoken, IdEncoder, choose_encoder
from tests.prepare.making import Prepare, as_line

MUCH = 1 << 30  # bytes of input that are worth gigatoken


@pytest.fixture(params=["olmo", "sentencepiece"], scope="module")
def tokenizer(request: pytest.FixtureRequest, olmo_tokenizer_file: Path, small_tokenizer_file: Path) -> Tokenizer:
    return load_tokenizer(olmo_tokenizer_file if request.param == "olmo" else small_tokenizer_file)


@pytest.fixture(scope="module")
def plan(tokenizer: Tokenizer) -> EncoderChoice:
    return choose_encoder(tokenizer, "auto", MUCH)


def trained(folder: Path, texts: list[str], **options: Any) -> Tokenizer:
    """By sentencepiece, with other options than those of `train_sentencepiece`."""
    import sentencepiece

    place = {"model_prefix": str(folder / "trained"), "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), **place, **options)
    return load_tokenizer(folder / "trained.model")


def test_gigatoken_serves_for_both_kinds(plan: EncoderChoice, tokenizer: Tokenizer) -> None:
    assert (plan.encoding.backend, plan.encoding.reason) == ("gigatoken", None)
    assert choose_encoder(tokenizer, "auto", input_bytes=1000).encoding.reason == SMALL_INPUT


def test_ids_are_those_of_the_exact_library(plan: EncoderChoice, tokenizer: Tokenizer, sample_texts: list[str]) -> None:
    source = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]
    hard = ["", SPACE_MARK, f"a{SPACE_MARK}b", "<|endoftext|>", "x<|endoftext|>y", "\u0eba\u0323", "\U0001e4ec", " "]
    encoder, others = plan.make_encoder(), source + hard
    found = [ids.tolist() for block in (sample_texts, others) for ids in encoder.encode(block)]
    assert found == tokenizer.encode_batch(sample_texts + others)


def test_texts_of_doubtful_characters_and_pieces_alone_go_to_the_exact_library(
    tokenizer: Tokenizer, plan: EncoderChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = load_tokenizer(tokenizer.path)
    encoder = IdEncoder(exact, Gigatoken(tokenizer.path), plan.doubtful_pieces)
    texts = ["plain", "one \U0001e4ec", "caf\u00e9", *(f"x{piece}" for piece in plan.doubtful_pieces)]
    expected = exact.encode_batch(texts)
    encoder.encode([texts[2]])  # compares the characters near
    seen, encode = list[str](), exact.encode
    monkeypatch.setattr(exact, "encode", lambda text: seen.append(text) or encode(text))
    assert [ids.tolist() for ids in encoder.encode(texts)] == expected
    assert seen == [texts[1], *texts[3:]]


def test_without_gigatoken_the_exact_library_serves(
    small_tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes with the extra `fast` alone."""
    tokenizer = load_tokenizer(small_tokenizer_file)
    monkeypatch.setattr(encoding, "find_spec", lambda _name: None)
    chosen = choose_encoder(tokenizer, "auto", MUCH).encoding
    assert chosen.backend != "gigatoken"
    assert chosen.reason == "gigatoken is not installed; pip install 'megatron_fanformer[fast]'"
    with pytest.raises(InputError, match=r"gigatoken cannot be used for .* \(gigatoken is not installed"):
        choose_encoder(tokenizer, "gigatoken", MUCH)


def test_a_tokenizer_that_gigatoken_cannot_read_goes_to_the_exact_library(
    tmp_path: Path, sample_texts: list[str]
) -> None:
    tokenizer = trained(tmp_path, " ".join(sample_texts).split(". "), model_type="unigram", vocab_size=400)
    chosen = choose_encoder(tokenizer, "auto", MUCH).encoding
    assert chosen.backend == "sentencepiece" and "gigatoken cannot read it" in str(chosen.reason)
    with pytest.raises(InputError, match="gigatoken cannot be used"):
        choose_encoder(tokenizer, "gigatoken", MUCH)


class Faulty(Gigatoken):
    """gigatoken with one id wrong, at whatever text `wrong` says."""

    wrong: Callable[[str], bool]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [ids + type(self).wrong(text) for text, ids in zip(texts, super().encode(texts), strict=True)]


def test_wrong_ids_on_a_hard_text_make_the_exact_library_take_over(
    small_tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "Gigatoken", Faulty)
    Faulty.wrong = staticmethod(lambda text: text == "a\r\nb\r\n\r\n c\r")
    chosen = choose_encoder(load_tokenizer(small_tokenizer_file), "auto", MUCH).encoding
    assert chosen.backend == "sentencepiece"
    assert chosen.reason == r"gigatoken's ids differ on 'a\r\nb\r\n\r\n c\r'"


def test_a_difference_seen_under_way_is_an_error(olmo_tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder is told to trust gigatoken with a character that it takes otherwise: its sample shows it."""
    monkeypatch.setattr(encoding.Trust, "covers", lambda *_: True)
    choice = choose_encoder(load_tokenizer(olmo_tokenizer_file), "gigatoken", MUCH)
    encoder = encoding.BlockEncoder(choice, Settings(text_field="text", dtype="uint16"))
    with pytest.raises(InputError, match=r"differ from the exact library's in document '1'; remove .* --backend token"):
        encoder.encode(0, as_line("x\u0eba\u0323\u0334 " * 3))


def test_memory_that_has_grown_is_given_back(olmo_tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "CACHE_TEXT_BYTES", 1000)
    monkeypatch.setattr(encoding, "CACHE_BYTES", -1)  # any memory is too much
    encoder = Gigatoken(olmo_tokenizer_file)
    first = encoder._tokenizer
    before = encoder.encode(["word " * 100])[0].tolist()
    assert encoder._tokenizer is first
    encoder.encode(["word " * 200])
    assert encoder._tokenizer is not first
    assert encoder.encode(["word " * 100])[0].tolist() == before


def test_a_long_text_has_the_same_ids_in_pieces(
    tokenizer: Tokenizer, sample_texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "PIECE_CHARACTERS", 100)
    text = "\n\n".join(sample_texts) + " \u0eba\u0323  two  spaces"
    seen, encode = list[int](), tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text: seen.append(len(text)) or encode(text))
    assert IdEncoder(tokenizer).encode([text])[0].tolist() == encode(text)
    assert max(seen[-10:]) < 1000 < len(text)


def test_a_tokenizer_that_joins_words_gets_long_texts_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the end of the day is the end of the night"
    tokenizer = trained(tmp_path, [text] * 50, model_type="bpe", vocab_size=60, split_by_whitespace=False)
    monkeypatch.setattr(encoding, "PIECE_CHARACTERS", 10)
    assert IdEncoder(tokenizer).encode([text])[0].tolist() == tokenizer.encode(text)


def exact(texts: Sequence[str]) -> list[list[int]]:
    """A made-up tokenizer of one id a character."""
    return [list(map(ord, unicodedata.normalize("NFC", text))) for text in texts]


@pytest.mark.parametrize(
    ("old", "new", "doubtful"),
    [
        ("\u4e00", "?", [0x4E00]),
        ("a\u0915b", "?", [0x0915]),
        ("\u0ece", "\u0378", [0x0ECE]),  # which has a combining class since Unicode 15 alone
        ("\u0100", "\u0100", []),
    ],
    ids=["one character", "with its neighbours", "a combining class", "none"],
)
def test_the_characters_that_two_libraries_take_otherwise_are_found(old: str, new: str, doubtful: list[int]) -> None:
    trust = encoding.Trust(lambda texts: exact([text.replace(old, new) for text in texts]), exact, [])
    assert not trust.covers(["x\U000e0001"])  # all of which go to the exact library
    assert trust.covers(["".join(map(chr, encoding.PROBED))]) == (not doubtful)
    assert [code for code in encoding.PROBED if trust.characters[code] == encoding.DOUBTED] == doubtful


def test_a_last_document_without_its_end_keeps_its_tokens(
    tmp_path: Path, small_tokenizer_file: Path, prepare: Prepare
) -> None:
    eod = load_tokenizer(small_tokenizer_file).eod_id
    np.array([5, 6, eod, eod, 7, 8], np.uint16).tofile(tmp_path / "a.npy")
    prefix = str(tmp_path / "out")
    prepare(prefix, tmp_path / "a.npy", from_npy=True)
    assert read_index(prefix).lengths.tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (b"\x93NUMPY\x01\x00", InputError, "NumPy header"),
        (b"abc", CorruptError, "not a whole number of uint16"),
        (np.array([600], np.uint16).tobytes(), InputError, "id 600, outside"),
    ],
)
def test_npy_files_that_cannot_serve_are_refused(
    tmp_path: Path, prepare: Prepare, data: bytes, kind: type[FanformerError], message: str
) -> None:
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(kind, match=message):
        prepare(tmp_path / "out", tmp_path / "a.npy", from_npy=True)


def test_token_files_of_another_end_of_text_are_not_one_document(
    tmp_path: Path, small_tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "BLOCK_TOKENS", 10)
    monkeypatch.setattr(encoding, "MAX_DOCUMENT_TOKENS", 100)
    np.full(200, 7, np.uint16).tofile(tmp_path / "a.npy")
    settings = Settings(text_field="", dtype="uint16", npy_dtype="uint16")
    tokenizer = TokenizerRecord(path="", sha256="", vocab_size=600, eod_id=1)
    with pytest.raises(InputError, match="no end-of-text id 1"):
        list(encoding.npy_blocks(tmp_path / "a.npy", settings, tokenizer))
