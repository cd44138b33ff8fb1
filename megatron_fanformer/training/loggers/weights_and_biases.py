"""Weights & Biases, which removes nothing: the steps that it has already are left out."""

import logging
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_fanformer.durable_files import regular_file, write_atomically
from megatron_fanformer.training.loggers.logger import Logger, Start
from megatron_fanformer.training.metrics import dashboard_name, numbers

FOLDER = "wandb"
RUN_ID = f"{FOLDER}/run-id"
LAST_STEP = f"{FOLDER}/last-step"
SECONDS = 60  # a run's longest wait for its server, at its start and end, and for the check of its key
LOGIN = """
import os, sys
os.environ.update(setting.split("=", 1) for setting in sys.argv[1:])
import wandb
wandb.login(verify=False)
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WeightsAndBiasesFields:
    """The fields of Weights & Biases."""

    wandb_project: str | None = None
    """Project of Weights & Biases (the extra `wandb`); null: none."""
    wandb_entity: str | None = None
    """Team or user there; null: the account's own."""
    wandb_exp_name: str | None = None
    """Name of the run there; null: W&B chooses."""
    wandb_mode: Literal["online", "offline"] | None = None
    """`offline` keeps the log in the run's folder, for `wandb sync`; null: by WANDB_MODE, else online."""


class WeightsAndBiases(Logger):
    """Keeps one W&B run for the whole run, however often that is resumed: its id is kept in the run's folder."""

    Fields = WeightsAndBiasesFields
    setting = "wandb_project"
    package = "wandb"
    files = (FOLDER,)

    def __init__(self, start: Start) -> None:
        import wandb

        config: WeightsAndBiasesFields = start.logging
        file, given = start.run / RUN_ID, start.run / LAST_STEP
        file.parent.mkdir(exist_ok=True)
        given.touch()
        last_step = int(regular_file(given).read_text() or 0)
        run_id = regular_file(file).read_text().strip() if file.exists() else uuid.uuid4().hex
        _wait_for_own_folder(file.parent, run_id)
        # For the whole process, so that without a key it fails, and asks for none: the other ranks would wait.
        wandb.setup(wandb.Settings(silent=True))
        self._run = wandb.init(
            project=config.wandb_project,
            entity=config.wandb_entity,
            name=config.wandb_exp_name,
            mode=config.wandb_mode,
            id=run_id,
            resume="allow",
            dir=str(start.run),
            config=start.values,
            settings=wandb.Settings(console="off", silent=True, init_timeout=SECONDS, finish_timeout=SECONDS),
        )
        write_atomically(file, self._run.id)
        # Rows cannot be taken back: what W&B has already stays. Online, its server knows what that is.
        self._last_step = last_step if self._run.offline else self._run.step - 1
        self._given = given.open("r+")
        if not self._run.offline:
            logger.info("Weights & Biases: %s", self._run.url)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of one step."""
        if step > self._last_step:
            row = {dashboard_name(name): value for name, value in numbers(metrics).items()}
            self._run.log(row, step=step, commit=True)
            self._last_step = step
            self._given.seek(0)
            self._given.write(f"{step:20}\n")  # one write over the last, which is as long
            self._given.flush()

    def close(self, *, failed: bool = False) -> None:
        """Send what is left, and end."""
        import wandb

        self._given.close()
        self._run.finish(exit_code=int(failed))
        wandb.teardown()  # waits for W&B's own process, which writes the last rows after `finish`

    @classmethod
    def machine_problems(cls, config: WeightsAndBiasesFields) -> list[str]:
        """Return what is missing for it: the package, or a login."""
        if found := super().machine_problems(config):
            return found
        if config.wandb_mode == "offline" or (refusal := _refusal(config)) is None:
            return []
        return [
            f"logging.wandb_project is {config.wandb_project}, but W&B has no login ({refusal}); run "
            "`wandb login`, set WANDB_API_KEY, or set logging.wandb_mode to offline"
        ]


def _refusal(config: WeightsAndBiasesFields) -> str | None:
    """Return why W&B does not begin a run for this user; needs no server.

    In a process of its own: W&B keeps what it finds, starts threads, and asks for a key where there is a terminal.
    """
    mode = [f"WANDB_MODE={config.wandb_mode}"] if config.wandb_mode else []
    try:
        login = subprocess.run(
            [sys.executable, "-c", LOGIN, "WANDB_SILENT=true", *mode],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return None  # the logger has a limit of its own
    if login.returncode == 0:
        return None
    return login.stderr.strip().rpartition("\n")[2].partition(": ")[2].rstrip(".")


def _wait_for_own_folder(folder: Path, run_id: str) -> None:
    """Until the second is over in which an earlier life began: W&B names the folder and the file of a life by it."""
    while any(folder.glob(f"*run-{time.strftime('%Y%m%d_%H%M%S')}-{run_id}")):
        time.sleep(0.05)
