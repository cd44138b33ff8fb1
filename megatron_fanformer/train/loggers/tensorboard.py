"""TensorBoard's event files: the metrics in groups, charts of several, the losses by tokens, the configuration."""

from typing import Any, cast

import yaml

from megatron_fanformer.configuration import by_dotted_names
from megatron_fanformer.markdown import code_block
from megatron_fanformer.train.loggers.logger import Logger, Start
from megatron_fanformer.train.metrics import DRAWN_BY_TOKENS, charts, dashboard_name, metric_of, numbers

FOLDER = "tensorboard"
BY_TOKENS = "by_tokens"  # a run beside the other in TensorBoard, whose axis is tokens, not steps


class TensorBoard(Logger):
    """Writes two runs, one by steps and one by tokens."""

    setting = "tensorboard"
    files = (FOLDER,)

    def __init__(self, start: Start) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = start.run / FOLDER
        self._by_step = SummaryWriter(str(folder), purge_step=start.step + 1)
        self._by_tokens = SummaryWriter(str(folder / BY_TOKENS), purge_step=start.tokens + 1)
        configuration = code_block(yaml.safe_dump(start.values, sort_keys=False), "yaml")
        self._by_step.add_text("configuration", configuration, start.step)
        self._by_step.add_custom_scalars(
            {category: {title: ["Multiline", tags] for title, tags in of.items()} for category, of in charts().items()}
        )
        plain = {k: v for k, v in by_dotted_names(start.values).items() if isinstance(v, bool | int | float | str)}
        for summary in hparams(plain, {"train/loss": None}):
            cast(Any, self._by_step.file_writer).add_summary(summary)  # typed as the None that it was once

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of one step."""
        for name, value in numbers(metrics).items():
            self._by_step.add_scalar(dashboard_name(name), value, step)
            if (metric := metric_of(name)) is not None and metric.name in DRAWN_BY_TOKENS:
                self._by_tokens.add_scalar(f"train_{BY_TOKENS}/{name}", value, metrics["tokens"])

    def close(self, *, failed: bool = False) -> None:
        """Flush and close the files."""
        self._by_step.close()
        self._by_tokens.close()
