"""Weights & Biases, which removes nothing: the steps that it has already are left out."""

import logging
import uuid
from typing import Any

from megatron_fanformer.durable_files import regular_file, write_atomically
from megatron_fanformer.train.loggers.logger import Logger, Start
from megatron_fanformer.train.metrics import dashboard_name, numbers

FOLDER = "wandb"
RUN_ID = f"{FOLDER}/run-id"
LAST_STEP = f"{FOLDER}/last-step"
SECONDS = 60  # a run's longest wait for its server, at its start and end

logger = logging.getLogger(__name__)


class WeightsAndBiases(Logger):
    """Keeps one W&B run for the whole run, however often that is resumed: its id is kept in the run's folder."""

    setting = "wandb_project"
    package = "wandb"
    files = (FOLDER,)

    def __init__(self, start: Start) -> None:
        import wandb

        config = start.logging
        file, given = start.run / RUN_ID, start.run / LAST_STEP
        file.parent.mkdir(exist_ok=True)
        given.touch()
        last_step = int(regular_file(given).read_text() or 0)
        run_id = regular_file(file).read_text().strip() if file.exists() else uuid.uuid4().hex
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
