"""Files of chats read back: a pair with its mask, and rows as OLMo's script leaves them, without a manifest."""

from pathlib import Path

import numpy as np
import pytest

from megatron_fanformer.data.chat_files import count_learned, open_chats
from megatron_fanformer.errors import CorruptError, FanformerError, InputError
from tests.chat_pairs import write_chats

CONVERSATIONS = [([5, 6, 7, 8], [0, 0, 1, 1]), ([9, 1], [0, 1]), ([2, 3, 4], [1, 0, 1])]


@pytest.fixture
def pair(tmp_path: Path) -> str:
    return write_chats(tmp_path / "chats", CONVERSATIONS)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """The conversations in rows of 2,048, padded with 1, and what their last learned token leaves of them."""
    ids, mask = np.ones((3, 2048), "<u2"), np.zeros((3, 2048), bool)
    for row, (own, learned) in enumerate(CONVERSATIONS):
        ids[row, : len(own) + 1] = [*own, 187]  # a line end follows the end of text
        mask[row, : len(own)] = learned
    folder = tmp_path / "tulu"
    folder.mkdir()
    ids.tofile(folder / "input_ids.npy")
    mask.tofile(folder / "label_mask.npy")
    return folder


def read(prefix: str) -> list[tuple[list[int], list[int]]]:
    chats = open_chats(prefix)
    assert chats.lengths.tolist() == [len(ids) for ids, _ in CONVERSATIONS]
    return [(ids.tolist(), learned.astype(int).tolist()) for ids, learned in (chats[n] for n in range(len(chats)))]


def test_both_forms_give_ids_and_what_is_learned(pair: str, rows: Path) -> None:
    assert read(pair) == CONVERSATIONS
    assert read(str(rows)) == CONVERSATIONS


def test_learned_tokens_are_counted_in_a_mask_of_0_and_1_alone(tmp_path: Path) -> None:
    mask = tmp_path / "a.mask.bin"
    mask.write_bytes(b"\0\1\1\0\1")
    assert count_learned(mask) == 3
    mask.write_bytes(b"\0\1\2")
    with pytest.raises(CorruptError, match="holds 2, a mask holds 0 and 1 alone"):
        count_learned(mask)


@pytest.mark.parametrize(
    ("name", "content", "kind", "message"),
    [
        ("chats.mask.bin", None, InputError, "these are token files of documents"),
        ("chats.mask.bin", bytes(8), CorruptError, "holds 8 bytes for 9 tokens"),
        ("chats.mask.bin", bytes(3) + b"\2" + bytes(5), CorruptError, "holds 2, not 0 or 1, in conversation 0"),
        ("chats.mask.bin", bytes(9), CorruptError, "has no learned token in conversation 0"),
        ("chats.bin", bytes(17), CorruptError, "holds 17"),
        ("tulu/label_mask.npy", b"\1" * 6143, CorruptError, "not rows of 2048"),
        ("tulu/label_mask.npy", (b"\1" + bytes(2047)) * 2 + bytes(2048), CorruptError, "row 2 .* no learned token"),
        ("tulu/input_ids.npy", bytes(6144), CorruptError, "hold 6144 and 6144 bytes"),
    ],
)
def test_files_that_disagree_are_named(
    pair: str, rows: Path, name: str, content: bytes | None, kind: type[FanformerError], message: str
) -> None:
    file = rows.parent / name
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with pytest.raises(kind, match=message):
        read(pair if name.startswith("chats") else str(rows))
