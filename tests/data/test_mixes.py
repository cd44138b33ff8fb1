"""Another mix from a step on, every source going on from its own place."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fanformer.data.check import check_files
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.mixes import first_step, order_mixes, source_counts, step_problems
from megatron_fanformer.data.sample_counts import SampleCounts
from megatron_fanformer.data.sample_order import shuffle_numbers
from megatron_fanformer.data.samples import sample_spans
from megatron_fanformer.errors import InputError
from tests.data.token_making import build, drawn, raw_tokens, write_npy, write_pair

SEQ_LENGTH = 64
SEED = 1  # of `build`


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    """Two pairs of 208 and 123 samples, and two .npy files of 140 and 15."""
    return {
        "a": write_pair(tmp_path / "a", [[300 + 10 * number] for number in range(30)]),
        "b": write_pair(tmp_path / "b", [[300 + 10 * number] for number in range(20)], seed=500),
        "c": write_npy(tmp_path / "c.npy", 9_000, seed=2000),
        "d": write_npy(tmp_path / "d.npy", 1_000, seed=3000),
    }


def named(data: dict[str, str], mix: str) -> list[str]:
    return [data.get(word, word) for word in mix.split()]


def config(data: dict[str, str], first: str, **later: str) -> DataConfig:
    stages = {f"from step {name[1:]}": named(data, mix) for name, mix in later.items()}
    return DataConfig(train_data=named(data, first), stages=stages)


def test_weights_are_divided_as_megatron_core_divides_them(tmp_path: Path) -> None:
    """To the last bit, which decides between errors that are nearly equal: sums in another order have another."""
    from megatron.core.datasets.utils import normalize

    pairs = [write_pair(tmp_path / f"{number:02d}", [[2100]], seed=number) for number in range(22)]
    draw, others = np.random.default_rng(4), 0
    for _ in range(20):
        weights = np.round(draw.random(22) + 0.1, 2).tolist()
        mix = [word for weight, pair in zip(weights, pairs, strict=True) for word in (str(weight), pair)]
        checked_data = check_files(DataConfig(train_data=mix))
        assert SampleCounts(checked_data, SEQ_LENGTH).mix_weights(checked_data.train) == normalize(weights)
        in_order = 0.0
        for weight in weights:
            in_order += weight
        others += [weight / in_order for weight in weights] != normalize(weights)
    assert others  # else any sum would do


@pytest.mark.parametrize("first", ["a", "c", "a b", "1 a 3 b", "a b c", "1 a 2 c 3 b", "c d"])
def test_the_first_stage_is_drawn_as_a_run_without_others(data: dict[str, str], first: str) -> None:
    """So that a run may get a stage when it has begun."""
    plain = build(config(data, first), 120).train
    staged = build(config(data, first, s101="1 b 1 a"), 200).train
    assert torch.equal(drawn(plain, 100), drawn(staged, 100))


def test_every_source_goes_on_from_its_place_epoch_after_epoch(data: dict[str, str]) -> None:
    """Each sample's tokens, cut from the raw files by a formula of the test's own."""
    train = build(config(data, "1 a 1 c", s101="1 c 1 d 1 a", s161="1 a 9 b"), 700).train
    order: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for index in range(700):
        spans = sample_spans(train, index)
        tokens = [token for span in spans for token in raw_tokens(span.prefix, span.first_token, span.length)]
        assert train[index]["tokens"].tolist() == tokens[:SEQ_LENGTH]
        order[Path(spans[0].prefix).name].append(tuple(tokens[:SEQ_LENGTH]))
    assert order.keys() == data.keys()
    # .npy files: an epoch is their samples in PCG64's order, and the next follows where it ends.
    for name, samples in (("c", 140), ("d", 15)):
        ids = np.fromfile(data[name], "<u2")
        expected = [
            tuple(ids[number * SEQ_LENGTH :][:SEQ_LENGTH].tolist())
            for epoch in range(9)
            for number in shuffle_numbers(samples, seed=SEED, epoch=epoch)
        ]
        assert order[name] == expected[: len(order[name])]
    assert len(order["d"]) > 15  # which it has read to its end
    # Pairs: the first epoch as that of the pair alone, the next the same samples shuffled anew.
    for name, samples in (("a", 208), ("b", 123)):
        alone = [tuple(row) for row in drawn(build(config(data, name), samples).train, samples).tolist()]
        again = [alone[number] for epoch in (1, 2, 3) for number in shuffle_numbers(samples, seed=SEED, epoch=epoch)]
        assert order[name] == [*alone, *again][: len(order[name])]
    assert len(order["b"]) > 2 * 123


def test_counts_by_source_are_those_of_the_samples(data: dict[str, str]) -> None:
    stages = config(data, "1 a 1 c", s101="2 c 1 d 1 a")
    for settings in (stages, config(data, "1 a 3 b 2 c")):
        train: Any = build(settings, 300).train
        sources = ["a", "c", "d"] if settings is stages else ["a", "b", "c"]
        drawn_from = [sources.index(Path(sample_spans(train, index)[0].prefix).name) for index in range(300)]
        for first, end in ((0, 300), (0, 0), (90, 130), (101, 300)):
            expected = np.bincount(drawn_from[first:end], minlength=3).tolist()
            assert source_counts(train, first, end, 3).tolist() == expected


# -- what is refused


@pytest.mark.parametrize(
    ("name", "step"),
    [("from step 9001", 9001), ("from step 9_001", 9001), ("from token 1000", 11), ("from token 1.501K", 17)],
)
def test_where_a_stage_begins(name: str, step: int) -> None:
    assert first_step(name, batch_tokens=100) == step


@pytest.mark.parametrize("name", ["9001", "from step 0", "step 5", "from step 1.5", "from token 3.9T ", "from epoch 2"])
def test_a_name_that_says_no_beginning_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="does not say where the stage begins"):
        first_step(name, batch_tokens=100)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stages": {"from step 5": ["nowhere"]}}, r"data\.stages\.from step 5: nowhere\.bin does not exist"),
        ({"stages": {"at step 5": ["{a}"]}}, "'at step 5' does not say where"),
        ({"stages": {"from step 5": ["1", "{a}", "1", "{c}", "2", "{a}"]}}, "names .*a twice; give it one weight"),
        ({"train_data": ["{c}", "{d}"], "stages": {"from step 5": ["{c}"]}}, "c.npy is in two sources, .*c.npy and 1"),
        ({"stages": {"from step 5": ["{folder}/../{name}/a"]}}, "a.bin is in two sources, .* in the same words"),
        ({"stages": {"from step 5": ["{a}"]}, "split": "9,1"}, "cannot be combined with data.split"),
    ],
)  # fmt: skip
def test_each_problem_is_named(data: dict[str, str], fields: dict[str, Any], message: str) -> None:
    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: filled(own) for name, own in value.items()}
        words = {**data, "folder": folder, "name": folder.name}
        return [word.format(**words) for word in value] if isinstance(value, list) else value

    folder = Path(data["a"]).parent
    problem, *_ = DataConfig(**filled({"train_data": ["{a}"], **fields})).problems()
    assert re.search(message, problem)


def test_stages_begin_one_after_the_other_within_the_run() -> None:
    names = ["from step 5", "from token 400", "from step 1", "from step 900"]
    problems = step_problems(names, train_iters=100, batch_tokens=100)
    assert [line.split(";")[0] for line in problems] == [
        "data.stages: 'from token 400' begins with step 5, as from step 5 does",
        "data.stages: 'from step 1' begins with step 1, as data.train_data does",
        "data.stages: 'from step 900' begins with step 900, after the last of 100",
    ]


def test_a_source_without_a_whole_sample_is_refused(data: dict[str, str], tmp_path: Path) -> None:
    data["e"] = write_pair(tmp_path / "e", [[SEQ_LENGTH]])
    settings = config(data, "a", s11="1 a 1 e")
    checked_data = check_files(settings)
    mixes = order_mixes(checked_data.train, checked_data.mixes, global_batch_size=1, seq_length=SEQ_LENGTH)
    with pytest.raises(InputError, match=r"e holds no whole sample of 64 tokens"):
        SampleCounts(checked_data, SEQ_LENGTH).check(settings, train_samples=20, valid_samples=1, mixes=mixes)
