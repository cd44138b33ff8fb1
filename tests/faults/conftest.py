"""What faults are tried on: a small run with its checkpoint and tokenizer, its export and its tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.convert.convert import convert_checkpoint
from tests.generate.making import write_tokenizer
from tests.small_runs import VOCAB_SIZE, small_run, write_config, write_tokens
from tests.train.test_trainer import train


@dataclass(frozen=True)
class Things:
    """Paths of sound things, of each kind that a command reads."""

    folder: Path
    values: dict[str, Any]
    """The run's configuration, with a step more to take."""
    config: Path
    run: Path
    export: Path
    tokenizer: Path
    tokens: str

    @property
    def checkpoint(self) -> Path:
        return self.run / "checkpoints" / "step-00000002"


@pytest.fixture(scope="session")
def things(run_on_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> Things:
    folder = tmp_path_factory.mktemp("things")
    tokenizer = write_tokenizer(folder, VOCAB_SIZE)
    values = small_run(
        write_tokens(folder / "tokens"),
        folder / "run",
        data={"tokenizer": str(tokenizer)},
        schedule={"lr_warmup_iters": 1},
        training={"train_iters": 2},
    )
    run_on_ranks(1, train, values)
    values["training"]["train_iters"] = 3
    convert_checkpoint(folder / "run", folder / "export", to="hf", verified=False)
    return Things(
        folder=folder,
        values=values,
        config=write_config(folder / "config.yaml", values),
        run=folder / "run",
        export=folder / "export",
        tokenizer=tokenizer,
        tokens=str(folder / "tokens"),
    )
