"""A run whose mix changes on the way: whatever stops it, in whatever layout it goes on, it reads the same samples."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.errors import InputError
from megatron_fanformer.train.config import config_from_dict
from megatron_fanformer.train.metrics import read_metrics
from megatron_fanformer.train.preflight import find_start
from tests.small_runs import SEQ_LENGTH, VOCAB_SIZE, RunOnRanks, small_run, trainer_of
from tests.token_pairs import write_token_pair

STEPS, BATCH = 24, 4
LAYOUTS: list[dict[str, Any]] = [
    {"data_parallel_size": 2},
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
    {"context_parallel_size": 2},
]


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    """Three stages with four sources, two pairs and two .npy files: ids of source k are k modulo 4."""
    draw = np.random.default_rng(0)

    def ids(source: int, count: int) -> Any:
        return 4 * draw.integers(VOCAB_SIZE // 4, size=count) + source

    long = write_token_pair(tmp_path / "long", [[ids(0, 40 + n)] for n in range(60)])
    short = write_token_pair(tmp_path / "short", [[ids(1, 40 + n)] for n in range(8)])
    npy = [str(tmp_path / name) for name in ("0.npy", "1.npy")]
    for source, (path, samples) in enumerate(zip(npy, (40, 12), strict=True), 2):
        ids(source, samples * SEQ_LENGTH).astype("<u2").tofile(path)
    stages = {
        "from step 9": ["1", short, "2", npy[0], "1", long],
        f"from token {16 * BATCH * SEQ_LENGTH}": ["3", short, "2", npy[1]],  # step 17
    }
    data = {"train_data": ["3", long, "1", npy[0]], "stages": stages}
    training = {"train_iters": STEPS, "global_batch_size": BATCH, "micro_batch_size": 1}
    return small_run(long, tmp_path / "run", data=data, training=training, logging={"norm_interval": 5})


def train_recorded(values: dict[str, Any], folder: Path) -> None:
    """On a rank: train, and write which tokens each step takes."""
    with trainer_of(values) as trainer:
        taken: list[tuple[int, list[list[int]]]] = []
        batches = trainer._batches

        def recorded() -> Iterator[Any]:
            for batch in batches:
                taken.append((trainer.step, batch["tokens"].tolist()))
                yield batch

        trainer._batches = recorded()  # type: ignore[assignment]
        first = trainer.step + 1
        trainer.train()
        if trainer.grid.groups.tp.rank() == trainer.grid.groups.cp.rank() == 0 and trainer.grid.is_first_stage:
            name = f"{first}-to-{trainer.step}-replica-{trainer.grid.data_parallel_rank}.json"
            (folder / name).write_text(json.dumps(taken))
        batches.close()


def rows_of_steps(folder: Path) -> dict[int, Counter[tuple[int, ...]]]:
    """The samples of each step, over all replicas and starts."""
    rows: dict[int, Counter[tuple[int, ...]]] = {}
    for file in folder.iterdir():
        for step, own in json.loads(file.read_text()):
            rows.setdefault(step, Counter()).update(map(tuple, own))
    return rows


def test_a_run_that_is_stopped_reads_what_one_reads_that_is_not(
    values: dict[str, Any], tmp_path: Path, run_on_ranks: RunOnRanks
) -> None:
    folders = [tmp_path / name for name in ("straight", "stopped")]
    for folder in folders:
        folder.mkdir()
    run_on_ranks(1, train_recorded, values, folders[0])
    straight = Path(values["training"]["run_dir"])
    values["training"]["run_dir"] = str(tmp_path / "stopped-run")
    draw = random.Random(2)
    layouts = draw.sample(LAYOUTS, 3)
    for number, step in enumerate([*sorted(draw.sample(range(2, STEPS), 2)), STEPS]):
        values["training"]["exit_interval"] = step
        run_on_ranks(2, train_recorded, {**values, "parallel": layouts[number]}, folders[1])
    expected, found = map(rows_of_steps, folders)
    assert sorted(expected) == list(range(1, STEPS + 1)) and found == expected
    counts = Counter[str]()
    for rows in expected.values():
        counts.update(("long", "short", "0", "1")[row[0] % 4] for row in rows.elements())
    for run in (straight, tmp_path / "stopped-run"):
        last = read_metrics(run)[-1]
        assert {name: last[f"data/{name}/tokens"] for name in counts} == {
            name: count * SEQ_LENGTH for name, count in counts.items()
        }
        assert [line["step"] for line in read_metrics(run) if "data/0/tokens" in line] == [5, 10, 15, 20, STEPS]
    assert sum(counts.values()) == STEPS * BATCH


def test_only_stages_to_come_may_be_changed(values: dict[str, Any], run_on_ranks: RunOnRanks, tmp_path: Path) -> None:
    """A run that began without them may get some; what it has been trained on stays."""
    stages, values["data"]["stages"] = values["data"]["stages"], {}
    (tmp_path / "rows").mkdir()
    values["training"]["exit_interval"] = 4
    run_on_ranks(1, train_recorded, values, tmp_path / "rows")
    values["data"]["stages"] = stages
    values["training"]["exit_interval"] = 9  # a step of the second
    run_on_ranks(1, train_recorded, values, tmp_path / "rows")
    assert run_folder.latest_checkpoint(Path(values["training"]["run_dir"])) is not None
    second, third = stages
    for changed, message in (
        ({second: stages[second], "from step 20": stages[third]}, None),
        ({"from step 8": stages[second]}, "another stage"),
        ({second: ["1", *stages[second][1:]], third: stages[third]}, None),
        ({second: ["5", *stages[second][1:]]}, "another stage"),
        ({second: [*stages[second][:2], *stages[third][2:]]}, "another stage"),
    ):
        values["data"]["stages"] = changed
        if message is None:
            find_start(config_from_dict(values), None)
            continue
        with pytest.raises(InputError, match=rf"data\.stages is not what the run in .* has used so far \({message}"):
            find_start(config_from_dict(values), None)
        values["data"]["allow_change"] = ["train"]
        assert [change.name for change in find_start(config_from_dict(values), None).identity.changes] == ["train"]
        del values["data"]["allow_change"]
