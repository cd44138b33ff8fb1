"""Perplexity sets: found as OLMo lays them out, and cut into pieces."""

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate.config import EvaluationConfig, PerplexityConfig
from megatron_fanformer.evaluate.perplexity_sets import SETS, PerplexitySet, find_sets, lengths_of, set_problems
from megatron_fanformer.evaluate.survey import survey_evaluation
from megatron_fanformer.prepare.prepare import prepare
from megatron_fanformer.prepare.verb import PrepareConfig
from tests.data.token_making import write_npy, write_pair
from tests.token_pairs import write_token_pair

VOCAB_SIZE = 600


def found(config: PerplexityConfig, **fields: Any) -> list[PerplexitySet]:
    return find_sets(config, **{"seq_length": 8, "vocab_size": VOCAB_SIZE, **fields})


def own(path: Path | str, **fields: Any) -> PerplexityConfig:
    return PerplexityConfig(sets={"own": [str(path)]}, **fields)


def lay_out(folder: Path, names: tuple[str, ...], form: str, *, first_id: int = 0) -> None:
    """A file of each set, in which every token is the set's number, and the two before it those of other files."""
    for number, name in enumerate(names):
        file = folder / form.format(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        np.full(20, first_id + number, "<u2").tofile(file)
        for other in ("test.npy", "train.npy"):  # beside val.npy there may be these
            if file.name == "val.npy":
                np.full(20, 599, "<u2").tofile(file.with_name(other))


def ids_of(each: PerplexitySet) -> set[int]:
    return {int(token) for piece in each.pieces() for token in each.read(piece)}


V3 = SETS["v3-small"]
UNDERSCORED = tuple(name.replace("common-crawl", "common_crawl") for name in V3)


@pytest.mark.parametrize(
    ("group", "form", "names"),
    [
        ("v3-small", "eval-data/perplexity/v3_small_gptneox20b/{}/val/part-0-00000.npy", V3),
        ("v3-small", "{}/val/part-0-00000.npy", UNDERSCORED),
        ("v2-small", "v2_small_gptneox20b/{}/val.npy", SETS["v2-small"]),
    ],
)
def test_a_group_is_found_as_olmo_lays_it_out(tmp_path: Path, group: Any, form: str, names: tuple[str, ...]) -> None:
    lay_out(tmp_path, names, form)
    sets = found(PerplexityConfig(groups=[group], folder=str(tmp_path)))
    assert [each.name for each in sets] == [f"{group}-{name}-validation" for name in SETS[group]]
    assert [ids_of(each) for each in sets] == [{number} for number in range(len(names))]


def test_missing_sets_are_named_at_once(tmp_path: Path) -> None:
    lay_out(tmp_path, V3[:-2], "v3/{}/part-0-00000.npy")
    config = PerplexityConfig(
        groups=["v3-small"], folder=str(tmp_path), sets={"a": [str(tmp_path / "none")], "b": [f"{tmp_path}/*.npy"]}
    )
    none, pattern, group = set_problems(config)
    assert "sets.a: " in none and "none names no token files; name a .npy file" in none
    assert "sets.b: " in pattern and "*.npy names no token files" in pattern
    assert "lacks 2 of the 11 sets of v3-small (pile, wikitext_103), looked for as SET/val.npy" in group
    with pytest.raises(InputError) as error:
        found(config)
    assert str(error.value).splitlines() == [none, pattern, group]
    with pytest.raises(InputError, match="folder: nowhere is not a folder"):
        found(dataclasses.replace(config, folder="nowhere"))


@pytest.mark.usefixtures("without_home")  # files of this machine need no cache
def test_tokens_are_cut_by_file_and_tails_dropped(tmp_path: Path) -> None:
    write_npy(tmp_path / "a.npy", 20)
    write_pair(tmp_path / "b", [[5], [3, 4], [6]])  # 18 tokens, whose documents are not told apart
    (each,) = found(own(tmp_path))
    assert each.pieces().tolist() == [[0, 0, 8, 7], [0, 8, 8, 7], [1, 0, 8, 7], [1, 8, 8, 7]]
    raw = np.fromfile(tmp_path / "b.bin", "<u2")
    assert each.read(each.pieces()[3]).tolist() == raw[8:16].tolist()


@pytest.mark.usefixtures("without_home")
def test_documents_are_scored_whole_and_each_token_once(tmp_path: Path) -> None:
    lengths = [1, 2, 8, 9, 15, 16, 40]
    write_pair(tmp_path / "b", [[length] if length % 2 else [length // 2, length // 2] for length in lengths])
    (each,) = found(own(tmp_path / "b", chunking="documents"))
    starts = np.cumsum([0, *lengths])[:-1]
    scored = [first + token for _, first, count, _ in each.pieces().tolist() for token in range(1, count)]
    assert sorted(scored) == [token for token in range(sum(lengths)) if token not in starts]
    assert each.pieces()[:, 2].max() == 8


def windows_of_lm_eval(tokens: list[int], prefix: int, length: int) -> Iterator[tuple[list[int], list[int]]]:
    """What is given and what is scored, by the definition of lm-eval 0.4.9: `get_rolling_token_windows` with
    context_len=1, each made disjoint.
    """
    pairs = [([prefix, *tokens[: min(length, len(tokens)) - 1]], tokens[:length])] if tokens else []
    predicted = min(length, len(tokens))
    while predicted < len(tokens):
        end = predicted + min(len(tokens) - predicted, length)
        pairs.append((tokens[end - length - 1 : end - 1], tokens[predicted:end]))
        predicted = end
    for context, scored in pairs:
        yield context[: len(context) - (len(scored) - 1)], scored


@pytest.mark.parametrize("with_ends", [True, False])
@pytest.mark.parametrize("form", ["pair", "npy"])
def test_rolling_windows_are_lm_evals(tmp_path: Path, form: str, with_ends: bool) -> None:
    end, length = 599, 8
    texts = [
        list(range(first, first + size)) for first, size in ((1, 1), (10, 8), (30, 9), (50, 16), (100, 45), (0, 0))
    ]
    documents = [[*text, end] if with_ends else text for text in texts]
    if form == "pair":
        write_token_pair(tmp_path / "a", [[np.array(each)] for each in documents if each])
    else:
        np.array(list(chain(*documents)), "<u2").tofile(tmp_path / "a.npy")
    (each,) = found(own(tmp_path, chunking="rolling", eod_id=end), seq_length=length)
    pieces = each.pieces()
    rows = [(each.read(piece).tolist(), int(piece[3])) for piece in pieces]
    assert lengths_of(pieces).tolist() == [len(ids) for ids, _ in rows]
    if form == "npy" and not with_ends:
        texts = [list(chain(*texts))]  # nothing tells them apart
    wanted = [window for text in texts for window in windows_of_lm_eval(text, end, length)]
    assert [(ids[:-scored], ids[-scored:]) for ids, scored in rows] == wanted
    (begun,) = found(own(tmp_path, chunking="rolling", eod_id=end, limit_tokens=9), seq_length=length)
    assert len(begun.documents()) == min(2, len(texts))  # whole ones
    with pytest.raises(InputError, match=r"does not say which id ends its documents, which leads each; set .*eod_id"):
        found(own(tmp_path, chunking="rolling"))


def test_a_limit_counts_tokens_from_the_beginning(tmp_path: Path) -> None:
    write_npy(tmp_path / "a.npy", 100)
    for tokens, pieces in ((24, 3), (25, 4)):  # pieces of 8
        (each,) = found(own(tmp_path, limit_tokens=tokens, chunk_tokens=8))
        assert len(each.pieces()) == pieces


TEXTS = ("Grüße aus Köln. " * 40, "def f(x):\n    return [x]\n" * 40)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, small_tokenizer_file: Path) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "documents.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    prepare(
        PrepareConfig(
            inputs=(str(folder / "documents.jsonl"),),
            output=str(folder / "tokens"),
            tokenizer=str(small_tokenizer_file),
            workers=1,
        ),
        lambda _: None,
    )
    return folder / "tokens"


def test_bytes_are_those_of_the_manifest_or_of_the_text_decoded(prepared: Path, small_tokenizer_file: Path) -> None:
    tokenizer = load_tokenizer(small_tokenizer_file)
    config = own(prepared, chunking="documents")
    (stated,) = found(config, seq_length=4096, tokenizer=None)
    text_bytes = len("".join(TEXTS).encode())
    assert stated.bytes_per_token == text_bytes / stated.files[0].file.tokens
    Path(f"{prepared}.manifest.json").rename(f"{prepared}.away")
    try:
        (decoded,) = found(config, seq_length=4096, tokenizer=tokenizer)
        (unknown,) = found(config, seq_length=4096, tokenizer=None)
    finally:
        Path(f"{prepared}.away").rename(f"{prepared}.manifest.json")
    # what is scored: all but the first token of each document
    firsts = [len(tokenizer.decode([int(decoded.read(piece)[0])]).encode()) for piece in decoded.pieces()]
    scored = decoded.files[0].file.tokens - len(firsts)
    assert decoded.bytes_per_token == (text_bytes - sum(firsts)) / scored
    assert unknown.bytes_per_token is None


def test_rolling_windows_count_every_byte_and_word_of_the_text(prepared: Path, small_tokenizer_file: Path) -> None:
    tokenizer = load_tokenizer(small_tokenizer_file)
    config = own(prepared, chunking="rolling")
    sizes = {}
    Path(f"{prepared}.manifest.json").rename(f"{prepared}.away")
    try:
        (sizes["decoded"],) = found(config, seq_length=16, tokenizer=tokenizer)
        (begun,) = found(dataclasses.replace(config, limit_tokens=16), seq_length=16, tokenizer=tokenizer)
    finally:
        Path(f"{prepared}.away").rename(f"{prepared}.manifest.json")
    (sizes["stated"],) = found(config, seq_length=16, tokenizer=tokenizer)
    (without,) = found(config, seq_length=16)
    for of_texts, each in ((TEXTS, sizes["decoded"]), (TEXTS, sizes["stated"]), (TEXTS[:1], begun), (TEXTS, without)):
        scored = int(each.pieces()[:, 3].sum())
        assert scored == sum(len(tokenizer.encode(text)) for text in of_texts)  # without the ends of documents
        assert each.bytes_per_token == sum(len(text.encode()) for text in of_texts) / scored
        if each is not without:
            assert each.words_per_token == sum(len(re.split(r"\s+", text)) for text in of_texts) / scored
    assert without.words_per_token is None


@pytest.mark.parametrize(
    ("stated", "has_manifest", "of_model", "expected"),
    [(7, True, 8, 7), (None, True, 8, 1), (None, False, 8, 8), (None, False, None, 1)],
)
def test_documents_end_as_stated_else_as_their_manifest_says_else_by_the_model(
    stated: int | None,
    has_manifest: bool,
    of_model: int | None,
    expected: int,
    prepared: Path,
    small_tokenizer_file: Path,
    tmp_path: Path,
) -> None:
    """And last by the tokenizer; what they do not end with is text."""
    for file in prepared.parent.glob("tokens.*"):
        shutil.copy(file, tmp_path)
    if not has_manifest:
        (tmp_path / "tokens.manifest.json").unlink()
    tokenizer = load_tokenizer(small_tokenizer_file)
    config = own(tmp_path / "tokens", chunking="rolling", eod_id=stated, limit_tokens=1 << 20)
    (each,) = found(config, seq_length=64, end_of_text_id=of_model, tokenizer=tokenizer)
    assert [int(each.read(piece)[0]) for piece in each.pieces() if piece[3] == piece[2]] == [expected] * 2
    ids = [int(token) for piece in each.documents() for token in each.read(piece)]
    text = tokenizer.decode([token for token in ids if token != expected])
    scored = int(each.pieces()[:, 3].sum())
    assert each.bytes_per_token == len(text.encode()) / scored


def test_a_set_of_another_tokenizer_is_told(
    prepared: Path, small_tokenizer_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in prepared.parent.glob("tokens*"):
        shutil.copy(file, tmp_path)
    manifest = tmp_path / "tokens.manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace(json.loads(text)["tokenizer"]["sha256"], "f" * 64))
    for prefix, expected in (
        (prepared, ""),
        (tmp_path / "tokens", "set own was made with another tokenizer (SHA-256 fff"),
    ):
        survey_evaluation(
            EvaluationConfig(perplexity=own(prefix, chunking="documents")),
            seq_length=64,
            vocab_size=VOCAB_SIZE,
            tokenizer=str(small_tokenizer_file),
        )
        assert expected in caplog.text and bool(expected) == bool(caplog.text)
