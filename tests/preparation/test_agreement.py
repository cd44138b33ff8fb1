"""Planted disagreements between two made-up tokenizers of one id a character."""

import unicodedata
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from megatron_fanformer.preparation.agreement import (
    CODE_POINTS,
    PROBED,
    SURROGATES,
    doubtful_pieces,
    first_difference,
    trusted_characters,
)

Rows = Callable[[Sequence[str]], list[list[int]]]


def exact(texts: Sequence[str]) -> list[list[int]]:
    return [list(map(ord, unicodedata.normalize("NFC", text))) for text in texts]


def replacing(old: str, new: str) -> Rows:
    return lambda texts: exact([text.replace(old, new) for text in texts])


def probed() -> np.ndarray:
    mask = np.zeros(CODE_POINTS, bool)
    for part in PROBED:
        mask[part.start : part.stop] = True
    mask[SURROGATES.start : SURROGATES.stop] = False
    return mask


def untrusted(fast: Rows) -> list[int]:
    return np.flatnonzero(probed() & ~trusted_characters(fast, exact)).tolist()


def test_tokenizers_that_agree_are_trusted_with_all_that_is_probed() -> None:
    assert np.array_equal(trusted_characters(exact, exact), probed())


def test_one_character_taken_otherwise_is_found() -> None:
    assert untrusted(replacing("\u4e00", "?")) == [0x4E00]


def test_a_character_whose_neighbours_matter_is_found() -> None:
    assert untrusted(replacing("a\u0915b", "?")) == [0x0915]


def test_a_combining_class_of_another_age_is_found() -> None:
    """U+0ECE has a combining class since Unicode 15 alone: without one, it keeps its place between two marks."""

    def older(texts: Sequence[str]) -> list[list[int]]:
        return exact([text.replace("\u0323", "\u0378") for text in texts])

    assert 0x0323 in untrusted(older)


def test_characters_that_make_a_difference_together_alone_are_all_distrusted() -> None:
    """Halving parts the two at last; all that were not parted yet are distrusted then."""
    assert untrusted(replacing("\u0531\u0532", "?")) == [0x0530, 0x0531, 0x0532, 0x0533]


def test_special_pieces_taken_otherwise_are_named() -> None:
    assert doubtful_pieces(replacing("<s>", ""), exact, ["<s>", "<pad>", "</s>"]) == ["<s>"]


@pytest.mark.parametrize(("old", "new"), [("\r\n", "\n"), ("'LL", "'ll"), ("a" * 50_000, "a"), ("\ufeff", "")])
def test_the_hard_texts_find_a_difference(old: str, new: str) -> None:
    difference = first_difference(replacing(old, new), exact)
    assert difference is not None and old in difference


def test_the_hard_texts_find_none_where_there_is_none() -> None:
    assert first_difference(exact, exact, ["<s>"]) is None
