"""The section `checkpoint` of a run's configuration: what is saved, and what a run starts from."""

from dataclasses import dataclass

from megatron_fanformer.checkpoint.remote import is_url, url_problem


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Configure what is saved, and what a run starts from."""

    save_interval: int | None = None
    """Steps between checkpoints; null: at the end only (and on a signal, and at `exit_interval`)."""
    keep: int | None = None
    """How many of the newest checkpoints to keep; null: all."""
    async_save: bool = False
    """Continue training while a checkpoint is being written."""
    fully_parallel_save: bool = True
    """Each replica writes and reads a part of a checkpoint."""
    load: str | None = None
    """A run's folder or a checkpoint, or its URL, whose weights a new run starts from (step 0, fresh optimizer);
    ignored if `run_dir` has a checkpoint."""
    mirror: str | None = None
    """URL of a folder on another store, such as s3://bucket/run, to which each checkpoint is copied and from which a
    lost run resumes (docs/checkpoints-and-conversion.md#another-store); null: none."""
    mirror_keep: int | None = None
    """How many of the newest checkpoints to keep there; null: all."""

    def problems(self) -> list[str]:
        """Rules of single fields that this configuration breaks, one line each."""
        found = [
            f"checkpoint.{name} is {value}; it must be at least 1, or null"
            for name in ("save_interval", "keep", "mirror_keep")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        urls = {"mirror": self.mirror, "load": self.load if self.load and is_url(self.load) else None}
        found += filter(None, (url_problem(f"checkpoint.{name}", url) for name, url in urls.items()))
        return found
