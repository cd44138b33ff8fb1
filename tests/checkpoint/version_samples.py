"""Runs whose checkpoints of both supported versions of megatron-core are samples (tests/samples/checkpoints).

`python -m tests.checkpoint.version_samples` writes the installed version's.
"""

import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.small_runs import ROOT, small_run, start_command, write_config, write_tokens

SAMPLES = ROOT / "tests" / "samples" / "checkpoints"
STEP = 2


def run_values(folder: Path, steps: int) -> dict[str, Any]:
    """A run of two thousand weights on tokens that are the same wherever it is, in a folder."""
    return small_run(
        write_tokens(folder / "tokens", vocab_size=32),
        folder / "run",
        model={"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32},
        schedule={"lr_warmup_iters": 1, "lr_decay_iters": 4},
        training={"train_iters": steps},
        checkpoint={"save_interval": STEP},
    )


def main() -> None:
    """Write the sample."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(Path(folder) / "run.yaml", run_values(Path(folder), STEP))
        process = start_command("train", "--config", str(config))
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        (checkpoint,) = (Path(folder) / "run" / "checkpoints").glob("step-*")
        major, minor, *_ = version("megatron-core").split(".")
        shutil.copytree(checkpoint, SAMPLES / f"megatron-core-{major}.{minor}", dirs_exist_ok=True)


if __name__ == "__main__":
    main()
