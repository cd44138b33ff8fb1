"""The text of a continuation: as the tokenizer decodes it behind its prompt, stopped at strings, known in part."""

import pytest

from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.generate.continuation import NewText
from tests.generate.making import Bytes

TEXT = "def f(x):\n    return [x, 'é', '中文', '🙂']  # it's\n\nThe  end. \N{SNOWMAN}"


def settled_after_each(text: str, *stop: str) -> list[str]:
    ids = list(text.encode())
    new = NewText(Bytes(), [65], stop)
    found = []
    for count in range(1, len(ids) + 1):
        new.update(ids[:count])
        found.append(new.settled)
    return found


@pytest.mark.parametrize("kind", ["olmo", "sentencepiece"])
def test_the_text_is_what_the_whole_decoded_sequence_adds_to_the_prompt(
    kind, olmo_tokenizer_file, small_tokenizer_file
):
    tokenizer = load_tokenizer(olmo_tokenizer_file if kind == "olmo" else small_tokenizer_file)
    ids = tokenizer.encode(TEXT)
    for cut in range(len(ids)):
        if tokenizer.decode(ids[:cut]) + tokenizer.decode(ids[cut:]) == TEXT:  # not within a character
            new = NewText(tokenizer, ids[:cut])
            new.update(ids[cut:])
            assert new.text == TEXT[len(tokenizer.decode(ids[:cut])) :]


def test_tokens_without_text_have_none():
    new = NewText(Bytes(), [0, 65])
    new.update([66, 299, 67, 0])
    assert new.text == "BC"


def test_a_character_is_settled_when_it_is_whole():
    assert settled_after_each("aé🙂b") == ["a", "a", "aé", "aé", "aé", "aé", "aé🙂", "aé🙂b"]


def test_what_may_begin_a_stop_string_is_not_settled():
    assert settled_after_each("a\n\nb\nc", "\n\nQ", "\nclass") == ["a", "a", "a", "a\n\nb", "a\n\nb", "a\n\nb"]


def test_the_first_stop_string_ends_the_text():
    new = NewText(Bytes(), [65], ["END", "x", "\nE"])
    new.update(list(b"one\nEND"))
    assert new.is_stopped
    assert new.text == new.settled == "one"
