"""The verb `parity`, and its options; imports nothing that is slow."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_fanformer.model.kernels import TransformerImpl
from megatron_fanformer.options import ANY_FIELD, Verb, option, overrides, path_or_none
from megatron_fanformer.runtime import device


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    """Options of `parity`."""

    file: Path = option(name="--config")
    """Configuration file (YAML)."""
    layouts: tuple[str, ...] = option((), metavar="LAYOUT")
    """Layouts to compare, such as tp=2,sp=true or "dp=2,distributed_optimizer=true,cp=2" (default: the configuration's
    own)"""
    steps: int = 20
    """Steps to train."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format of weights and activations."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to run on, whatever the configuration says: a cluster's can be compared on a laptop, too."""
    transformer_impl: TransformerImpl = option("auto", metavar="LAYERS")
    """Implementation of the layers: local (megatron-core's and torch's), transformer_engine, or auto: Transformer
    Engine's if it can be imported."""
    communication: bool = False
    """Count the bytes that a step's collectives move, too (with local layers)."""
    report: Path | None = option(None, metavar="FILE", parse=path_or_none)
    """Write everything as JSON."""
    overrides: tuple[str, ...] = overrides()


def _parity(config: ParityConfig) -> None:
    device.prepare_libraries()
    from megatron_fanformer.parity.command import parity

    parity(config)


PARITY = Verb(
    name="parity",
    help="Show that parallel layouts train the same model as one process.",
    options=ParityConfig,
    run=_parity,
    examples=(
        "parity --config examples/tiny-cpu.yaml\n--layouts tp=2 pp=2",
        "parity --config run.yaml --layouts tp=2,sp=true\n--communication --transformer-impl local",
    ),
    notes=ANY_FIELD,
)
