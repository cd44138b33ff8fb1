"""Files of chats read back, conversations packed into samples, and what a sample says about each."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fanformer.data.chats import Conversations, first_fit, open_chats, pack, parse_chats
from megatron_fanformer.data.check import check_files
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.datasets import build_datasets
from megatron_fanformer.data.fingerprint import fingerprint_data, resumed_fingerprint
from megatron_fanformer.data.samples import ChatDataset
from megatron_fanformer.errors import CorruptError, FanformerError, InputError
from tests.chat_pairs import Chat, random_chats, write_chats

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


VOCAB_SIZE, SEQ_LENGTH = 100, 16
APART = {"format": "sft", "reset_attention_mask": True}


def first_fit_by_hand(lengths: list[int], capacity: int) -> list[int]:
    room: list[int] = []
    bins = []
    for length in lengths:
        found = next((number for number, left in enumerate(room) if left >= length), len(room))
        room += [capacity] * (found == len(room))
        room[found] -= length
        bins.append(found)
    return bins


@pytest.mark.parametrize(("count", "capacity"), [(1, 1), (40, 1), (7, 9), (300, 10), (300, 64)])
def test_each_goes_where_there_is_room_first(count: int, capacity: int) -> None:
    lengths = np.random.default_rng(count).integers(1, capacity + 1, size=count)
    assert first_fit(lengths, capacity).tolist() == first_fit_by_hand(lengths.tolist(), capacity)


def test_all_that_holds_tokens_is_packed_once_and_fits() -> None:
    lengths = np.array([0, 5, 70, 3, 0, 16, 16, 1])
    packing = pack(lengths, 16, seed=3)
    assert Counter(packing.members.tolist()) == Counter([1, 2, 3, 5, 6, 7])
    assert (packing.tokens, packing.cut) == (5 + 16 + 3 + 16 + 16 + 1, 1)  # as long as a sample is not longer
    for sample in range(len(packing)):
        assert np.minimum(lengths[packing.conversations(sample)], 16).sum() <= 16
    assert any(pack(lengths, 16, seed=seed).members.tolist() != packing.members.tolist() for seed in range(4))


# -- samples


def dataset(chats: list[Chat], folder: Path, **options: Any) -> ChatDataset:
    prefix = write_chats(folder / "chats", chats)
    return ChatDataset(
        Conversations(parse_chats([prefix])), seq_length=SEQ_LENGTH, seed=1, vocab_size=VOCAB_SIZE, **options
    )


def test_a_sample_is_its_conversations_and_predicts_nothing_across_them(tmp_path: Path) -> None:
    end = 0  # the end of text, whose id padding has, too
    chats: list[Chat] = [
        ([end, 5, 6, 7, end], [False, False, False, True, True]),
        ([end, 8, end, 9, end], [False, False, True, False, True]),
        (list(range(30, 50)), [place > 9 for place in range(20)]),  # longer than a sample
    ]
    packed = dataset(chats, tmp_path)
    assert len(packed) == 2
    assert pack(packed.conversations.lengths, SEQ_LENGTH, seed=1).describe() == (
        "3 conversations of 26 tokens in 2 samples of 16, 81.2% filled; 1 of the conversations cut to fit"
    )
    samples = [{name: tensor.tolist() for name, tensor in packed[number].items()} for number in range(2)]
    long, short = sorted(samples, key=lambda sample: sample["tokens"][0] == end)
    assert long["tokens"] == list(range(30, 46)) and long["labels"][:-1] == list(range(31, 46))
    assert long["loss_mask"] == [0.0] * 9 + [1.0] * 6 + [0.0]
    first, second = chats[:2] if short["tokens"][1] == 5 else chats[1::-1]
    assert short["tokens"] == [*first[0], *second[0], *[0] * 6]
    assert short["labels"] == [*first[0][1:], 0, *second[0][1:], 0, *[0] * 6]
    assert short["loss_mask"] == [*map(float, first[1][1:]), 0.0, *map(float, second[1][1:]), 0.0, *[0.0] * 6]
    assert sum(short["loss_mask"]) == sum(map(sum, (first[1], second[1])))  # learned ends of text included
    assert short["position_ids"] == [*range(5), *range(5), *range(6)]
    assert short["document_ids"] == [0] * 5 + [1] * 5 + [2] * 6


def test_an_epoch_has_every_conversation_once_and_the_next_has_another_order(tmp_path: Path) -> None:
    chats = random_chats(60, vocab_size=VOCAB_SIZE)
    epoch = dataset(chats, tmp_path).epoch_samples
    three = dataset(chats, tmp_path, samples=3 * epoch)
    taken = [[tuple(three.members(epoch * turn + sample)) for sample in range(epoch)] for turn in range(3)]
    for turn in taken:
        assert Counter(number for members in turn for number in members) == Counter(range(60))
    assert len({tuple(turn) for turn in taken}) == 3 and len({frozenset(turn) for turn in taken}) == 1
    again = dataset(chats, tmp_path, samples=epoch)
    assert [again[number]["tokens"].tolist() for number in range(epoch)] == [
        three[number]["tokens"].tolist() for number in range(epoch)
    ]


def test_a_split_cuts_each_source_by_conversations(tmp_path: Path) -> None:
    chats = [random_chats(30, vocab_size=VOCAB_SIZE, seed=seed) for seed in range(2)]
    prefixes = [write_chats(tmp_path / name, own) for name, own in zip("ab", chats, strict=True)]
    config = DataConfig(train_data=prefixes, split="8,2", **APART)
    sizes = {"seq_length": SEQ_LENGTH, "train_samples": 1, "valid_samples": None, "seed": 0}
    datasets = build_datasets(config, vocab_size=VOCAB_SIZE, eod_id=0, **sizes)
    for packed, part in ((datasets.train, slice(0, 24)), (datasets.valid["validation"], slice(24, 30))):
        places = [packed.conversations.locate(number) for number in range(len(packed.conversations.lengths))]
        read = [files[own][0].tolist() for files, own in places]
        assert read == [list(ids) for own in chats for ids, _ in own[part]]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"train_data": ["0.5", "{a}"]}, "'0.5' is a weight, and chats have none"),
        ({"train_data": ["{a}.none"]}, "a.none.mask.bin does not exist; name what prepare --chat has written"),
        ({"train_data": []}, "the list is empty"),
        ({"train_data": ["{a}"], "eod_mask_loss": True}, "data.eod_mask_loss: true, but chats state themselves"),
    ],
)
def test_bad_input_is_a_line(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    prefix = write_chats(tmp_path / "a", random_chats(3, vocab_size=VOCAB_SIZE))
    config["train_data"] = [word.format(a=prefix) for word in config["train_data"]]
    (problem,) = DataConfig(**{**APART, **config}).problems()
    assert message in problem


def test_a_split_that_leaves_no_conversation_is_refused(tmp_path: Path) -> None:
    prefix = write_chats(tmp_path / "a", random_chats(3, vocab_size=VOCAB_SIZE))
    with pytest.raises(InputError, match=r"no conversation is left for validation by data.split 99,1"):
        Conversations(parse_chats([prefix]), split="99,1", part=1)


def test_another_mask_is_other_data(tmp_path: Path) -> None:
    prefix = write_chats(tmp_path / "a", random_chats(30, vocab_size=VOCAB_SIZE))
    config = DataConfig(train_data=[prefix], **APART)
    before = fingerprint_data(config, check_files(config))
    mask = Path(f"{prefix}.mask.bin")
    mask.write_bytes(bytes([1]) + mask.read_bytes()[1:])
    with pytest.raises(InputError, match=r"data\.train_data is not what the run in run has used"):
        resumed_fingerprint(before, fingerprint_data(config, check_files(config)), step=1, allowed=(), run="run")
