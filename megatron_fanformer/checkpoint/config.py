"""The section `checkpoint` of a run's configuration: its saves, and its start."""

from dataclasses import dataclass

from megatron_fanformer.stores import is_url, url_problem


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """A run's saves, and its start."""

    save_interval: int | None = None
    """Steps between checkpoints; null: at the end only."""
    keep: int | None = None
    """Number of the newest checkpoints to keep; null: all."""
    async_save: bool = False
    """Continue training during a save."""
    fully_parallel_save: bool = True
    """Each replica writes and reads a part of a checkpoint."""
    load: str | None = None
    """A run's folder, a checkpoint, or its URL: a new run starts from its weights (step 0, fresh optimizer)."""
    mirror: str | None = None
    """URL of a folder on another store, such as s3://bucket/run, to which checkpoints are copied
    (docs/checkpoints-and-conversion.md#another-store)."""
    mirror_keep: int | None = None
    """Number of the newest checkpoints to keep on the mirror; null: all."""

    def problems(self) -> list[str]:
        """Return the rules of single fields that this configuration breaks, one line each."""
        problems = [
            f"checkpoint.{name} is {value}; it must be at least 1, or null"
            for name in ("save_interval", "keep", "mirror_keep")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        urls = {"mirror": self.mirror, "load": self.load if self.load and is_url(self.load) else None}
        problems += filter(None, (url_problem(f"checkpoint.{name}", url) for name, url in urls.items()))
        return problems
