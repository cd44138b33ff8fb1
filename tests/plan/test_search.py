"""The search against looking at every layout, and what it rejects against what `train` says of the same."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator

import pytest

from megatron_fanformer.errors import InputError
from megatron_fanformer.plan.candidates import all_layouts, laid_out, layout_name
from megatron_fanformer.plan.estimate import Estimate, estimate, for_machine, job_of, problems
from megatron_fanformer.plan.machines import DRIVERS_SHARE, Machine, load_machine
from megatron_fanformer.plan.search import MOST_SHOWN, NUMBERS, judge, search
from megatron_fanformer.train.config import RunConfig, load_config
from megatron_fanformer.train.preflight import find_start
from tests.plan.test_candidates import run_config
from tests.small_runs import ROOT, write_tokens

GPUS = 8


@pytest.fixture(scope="module")
def h100() -> Machine:
    return load_machine("h100")


@pytest.fixture(scope="module")
def config(h100: Machine, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A small model of 6 layers, whose FAN map does not divide over four ranks; 8 samples a step."""
    tokens = write_tokens(tmp_path_factory.mktemp("tokens") / "tokens")
    made = run_config(
        model={"num_layers": 6, "fan": {"p_ratio": 0.2}},
        data={"train_data": [tokens]},
        training={"run_dir": str(tmp_path_factory.mktemp("runs") / "run"), "global_batch_size": 8},
    )
    return for_machine(made, h100, on_cpu=False)


def every_layout(config: RunConfig, gpus: int) -> Iterator[RunConfig]:
    for micro_batches in all_layouts(config, gpus):
        yield from micro_batches


@pytest.fixture(scope="module")
def legal(config: RunConfig, h100: Machine) -> list[Estimate]:
    return [
        estimate(layout_name(each, config), each, job_of(each, GPUS), h100)
        for each in every_layout(config, GPUS)
        if not problems(each, GPUS)
    ]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_it_finds_what_looking_at_every_layout_finds(
    config: RunConfig, legal: list[Estimate], h100: Machine, share: float
) -> None:
    """On machines on which all layouts fit, on which half do, and on which few do: `share` do not."""
    needed = sorted(each.needed_bytes for each in legal)
    limit = needed[round((1 - share) * (len(needed) - 1))]
    small = dataclasses.replace(h100, memory_bytes=math.ceil(limit / (1 - DRIVERS_SHARE)))
    fitting = [each for each in legal if each.needed_bytes <= limit]
    fastest = sorted(fitting, key=lambda each: each.time.seconds)[:MOST_SHOWN]
    found = search(config, GPUS, small)
    assert [each.name for each in found.candidates] == [each.name for each in fastest]
    assert [each.time for each in found.candidates] == [each.time for each in fastest]
    assert found.legal == len(legal)


def test_chunks_that_hide_more_of_the_gradients_are_not_bound_by_whole_stages(h100: Machine) -> None:
    """Where the interleaved schedule's longer window for gradients weighs more than its bubble."""
    slow = dataclasses.replace(h100, network=dataclasses.replace(h100.network, bytes_per_second=12.5e9))
    three = load_config(ROOT / "examples" / "fanformer-3b.yaml", ["--training.global_batch_size", "64"])
    found = search(for_machine(three, slow, on_cpu=False), 64, slow)
    seconds = [each.time.seconds for each in found.candidates]
    assert seconds == sorted(seconds)


def test_it_counts_what_each_rule_rejects(config: RunConfig, h100: Machine) -> None:
    counts = Counter(
        NUMBERS.sub("N", message) for each in every_layout(config, GPUS) for message in problems(each, GPUS)
    )
    found = search(config, GPUS, h100)
    assert {each.rule: each.count for each in found.rejected} == counts
    assert found.judged == sum(1 for _ in every_layout(config, GPUS))


def test_train_says_of_an_example_what_the_search_does(config: RunConfig, h100: Machine) -> None:
    rejected = search(config, GPUS, h100).rejected
    for each in rejected:
        with pytest.raises(InputError) as refused:
            find_start(laid_out(config, each.example), GPUS)
        assert each.message in str(refused.value).splitlines()
    assert len(rejected) > 3


def test_where_nothing_fits_the_one_that_lacks_least_is_shown(
    config: RunConfig, legal: list[Estimate], h100: Machine
) -> None:
    found = search(config, GPUS, dataclasses.replace(h100, memory_bytes=1))
    (shown,) = found.candidates
    assert found.best is None
    assert shown.needed_bytes == min(each.needed_bytes for each in legal)
    (too_large,) = (each for each in found.rejected if each.example == shown.name)
    assert too_large.count == len(legal)


def test_of_named_layouts_those_that_fit_come_first(config: RunConfig, legal: list[Estimate], h100: Machine) -> None:
    """However slow; each group by its time."""
    by_bytes = sorted(legal, key=lambda each: each.needed_bytes)
    middle = by_bytes[len(by_bytes) // 2].needed_bytes
    half = dataclasses.replace(h100, memory_bytes=math.ceil(middle / (1 - DRIVERS_SHARE)))
    named = [(each.name, laid_out(config, each.name)) for each in legal[::7]]
    found = judge(named, GPUS, half).candidates
    fitting = [each.fits for each in found]
    assert fitting == sorted(fitting, reverse=True) and 0 < sum(fitting) < len(found) == len(named)
    for group in (True, False):
        seconds = [each.time.seconds for each in found if each.fits is group]
        assert seconds == sorted(seconds)
    assert max(each.time.seconds for each in found if each.fits) > min(
        each.time.seconds for each in found if not each.fits
    )
