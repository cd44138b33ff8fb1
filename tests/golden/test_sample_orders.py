"""The orders of samples as they were recorded, so that a run that began with an earlier version goes on in its own.

Checksums of the tokens of all samples, written on 2026-11-25 by the version before stages of the data, with
megatron-core 0.16.1; 0.19.2 has the same.
"""

import zlib

import pytest
import torch

from megatron_fanformer.data.config import DataConfig
from tests.data.token_making import build, drawn, write_npy, write_pair

RECORDED = {
    ("a", 150): 3107522113,
    ("a", 900): 1124266363,
    ("a b", 200): 2036131999,
    ("a b", 1000): 1038197271,
    ("1 a 3 b", 400): 150808666,
    ("c", 100): 1307143146,
    ("c d", 500): 3863040079,
    ("1 c 2 d", 300): 2957752387,
    ("a c b", 150): 1775639115,
    ("1 a 2 c 3 b", 700): 3211240221,
    ("a, split", 300): 170946991,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("sources")
    return {
        "a": write_pair(folder / "a", [[300 + 10 * number] for number in range(30)]),
        "b": write_pair(folder / "b", [[40 + number] for number in range(60)], seed=99),
        "c": write_npy(folder / "c.npy", 9000, seed=5),
        "d": write_npy(folder / "d.npy", 3000, seed=6),
    }


@pytest.mark.parametrize(("mix", "samples"), RECORDED, ids=str)
def test_an_order_is_the_one_that_was_recorded(sources: dict[str, str], mix: str, samples: int) -> None:
    words, _, split = mix.partition(", ")
    data = DataConfig(
        train_data=[sources.get(word, word) for word in words.split()], split="80,20,0" if split else None
    )
    tokens = drawn(build(data, samples, None).train, samples).to(torch.int32)
    assert zlib.crc32(tokens.numpy().tobytes()) == RECORDED[mix, samples]
