"""The verb `demo` and its options; imports nothing that is slow."""

from dataclasses import dataclass
from pathlib import Path

from megatron_fanformer.options import Verb
from megatron_fanformer.runtime import device


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of `demo`."""

    output: Path = Path("runs/demo")
    """Folder for all files of the demo."""


def demo(options: DemoOptions) -> None:
    """Run the demo, on the CPU even if there is a GPU."""
    device.prepare_megatron(on_cpu=True)
    from megatron_fanformer.demo.demo import run_demo

    run_demo(options.output)


DEMO = Verb(
    name="demo",
    help="From text to a trained FANformer, on this machine, in minutes.",
    options=DemoOptions,
    run="megatron_fanformer.demo.verb:demo",
    examples=("demo", "demo --output runs/demo"),
)
