"""The versions that a conversion was made with."""

import functools
import platform
from importlib import metadata

from megatron_fanformer import __version__

PACKAGES = ("torch", "megatron-core", "transformers", "safetensors", "numpy")


def versions() -> dict[str, str]:
    """By name: Python's, ours, and those of the packages involved."""
    ours = {"python": platform.python_version(), "megatron-fanformer": __version__}
    return {**ours, **{package: _installed(package) for package in PACKAGES}}


@functools.cache  # a query takes ten milliseconds
def _installed(package: str) -> str:
    return metadata.version(package)
