"""The section `evaluation` of a run's configuration: what is measured besides the validation loss, and when."""

from dataclasses import dataclass, field

from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluation.perplexity_config import PerplexityConfig
from megatron_fanformer.evaluation.tasks import resolve


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Tasks and perplexity sets that a run measures as it goes on (docs/evaluation.md#in-the-loop)."""

    requests: str | None = None
    """Request file of `evaluate --prepare`, made with `data.tokenizer`; null: no tasks."""
    tasks: list[str] = field(default_factory=list)
    """Tasks of the request file, or groups (`paper`, `olmo-core-8`, `easy`, `mmlu`); empty: all of its choice tasks."""
    limit: int | None = None
    """Documents of each task, its first ones; null: all."""
    interval: int | None = None
    """Steps between evaluations on tasks and perplexity sets; null: `training.eval_interval`. A run's end is evaluated
    too."""
    batch_tokens: int | None = None
    """About how many tokens a micro batch has in evaluation, padding included; null: `micro_batch_size` ×
    `seq_length`."""
    perplexity: PerplexityConfig = field(default_factory=PerplexityConfig)
    """Sets of tokens whose perplexity is measured."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be measured."""
        return self.requests is None and self.perplexity.is_empty

    def problems(self) -> list[str]:
        """Rules of single fields that this configuration breaks, one line each; no file is opened."""
        found = [
            f"evaluation.{name} is {value}; it must be at least 1, or null"
            for name in ("limit", "interval", "batch_tokens")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if self.requests is None:
            found += [
                f"evaluation.{name} is set without evaluation.requests; name a request file, which `evaluate "
                "--prepare` writes"
                for name in ("tasks", "limit")
                if getattr(self, name)
            ]
        if self.is_empty:
            found += [
                f"evaluation.{name} is set without tasks or perplexity sets; name evaluation.requests or "
                "evaluation.perplexity.sets, or leave it out"
                for name in ("interval", "batch_tokens")
                if getattr(self, name)
            ]
        return [*found, *self._task_problems(), *self.perplexity.problems()]

    def _task_problems(self) -> list[str]:
        try:
            tasks = resolve(self.tasks)
        except InputError as error:
            return [f"evaluation.tasks: {line}" for line in str(error).splitlines()]
        return [
            f"evaluation.tasks has {task.name}, whose answers a model writes; leave it out, and have `evaluate` score "
            "the run's checkpoints on it"
            for task in tasks
            if task.is_generated
        ]
