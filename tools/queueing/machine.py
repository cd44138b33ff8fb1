"""Check that this machine can run the queue: modules, the GPU, Transformer Engine.

    python tools/queueing/machine.py MACHINE.json [--rehearse]

All missing modules are named before anything else is checked.
"""

import importlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

# What the package, its tests on a GPU and the benchmarks import; the text and tokens of the claim.
MODULES = (
    "torch transformer_engine.pytorch megatron.core triton numpy yaml rich tensorboard psutil safetensors isal msgspec "
    "pydantic pytest pytest_timeout transformers"
)
OF_TEXT = "sentencepiece pyarrow"


def main(file: Path, rehearses: bool) -> None:
    """Print the machine, and write it as JSON; exit with an error if something is missing."""
    if missing := _missing(MODULES):
        sys.exit(f"add to the site folder: {missing}")
    if missing := _missing(OF_TEXT):
        print(f"the parts text and claim need in the site folder: {missing}")
    import torch

    from megatron_fanformer.model.layer_spec import transformer_engine_problem

    if not torch.cuda.is_available():
        sys.exit("torch finds no usable GPU: all tests would be skipped")
    if problem := transformer_engine_problem():
        sys.exit(f"Transformer Engine: {problem}")
    packages = ("torch", "megatron-core", "transformer-engine", "triton")
    facts = {name: importlib.metadata.version(name) for name in packages} | {"cuda": torch.version.cuda}
    facts |= {"gpu": torch.cuda.get_device_name(), "gpus": 1 if rehearses else torch.cuda.device_count()}
    if not rehearses:
        subprocess.run(["nvidia-smi"], check=True)
    file.write_text(json.dumps(facts, indent=1) + "\n")


def _missing(modules: str) -> str:
    """Return the modules that cannot be imported, with the reasons."""
    missing = []
    for name in modules.split():
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken library raises anything
            missing.append(f"{name} ({type(error).__name__}: {error})")
    return "; ".join(missing)


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--rehearse" in sys.argv[2:])
