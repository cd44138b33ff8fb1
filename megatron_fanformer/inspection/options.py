"""What `inspect` takes; imports nothing that is slow."""

from dataclasses import dataclass
from pathlib import Path

from megatron_fanformer.options import argument, option, overrides, path_or_none


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """What `inspect` takes."""

    path: str = argument(metavar="PATH")
    """Token files (a prefix, one of them, a blend file, a folder), a run or a checkpoint or the URL of one, or an
    exported folder."""
    verify: bool = False
    """Check that all of it is present and undamaged."""
    json: bool = False
    """Print one JSON object."""
    phases: str | None = option(None, metavar="FILE")
    """Draw the phase health that a run has logged into this PNG."""
    step: int | None = None
    """Show the samples of this training step, of a run or of --config."""
    config: Path | None = option(None, metavar="FILE", parse=path_or_none)
    """With --step: the configuration that trains on PATH."""
    full: bool = False
    """With --step: show whole texts."""
    overrides: tuple[str, ...] = overrides()
