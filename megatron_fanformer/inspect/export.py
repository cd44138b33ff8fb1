"""Describes and verifies exported folders: those of transformers, and the authors'. No weights are read to describe."""

from collections.abc import Mapping

from torch import Tensor

from megatron_fanformer.checkpoint.data_files import check_archive
from megatron_fanformer.convert.huggingface import open_huggingface
from megatron_fanformer.convert.name_table import Format, expected_shapes
from megatron_fanformer.convert.recognition import Target
from megatron_fanformer.convert.reference import open_reference
from megatron_fanformer.convert.weight_files import weight_files
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.inspect.checkpoint import model_facts, text_facts
from megatron_fanformer.inspect.report import Report, reading
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.terminal import plural

# A torch archive's records are checked by their CRC-32; safetensors have none.
PICKLE_SUFFIXES = (".pt", ".bin")


def describe_export(target: Target) -> Report:
    """Describe the model, its type and its files.

    Raises:
        InputError: the model cannot be built here.
        CorruptError: a file is missing or cannot be read.
    """
    kind, config, shapes = _opened(target)
    files = weight_files(target.path)
    return {
        "kind": kind,
        "path": str(target.path),
        "model": model_facts(config),
        "dtype": ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in shapes.values()})),
        "tensors": len(shapes),
        "stored_parameters": sum(tensor.numel() for tensor in shapes.values()),
        "shards": [file.name for file in files],
        "bytes": sum(file.stat().st_size for file in files),
        **text_facts(target.path),
    }


def _opened(target: Target) -> tuple[Format, FANformerConfig, Mapping[str, Tensor]]:
    """Return the format, the model, and its tensors on the meta device."""
    config, tensors = open_huggingface(target.path) if target.kind == "hf" else open_reference(target.path)
    return "hf" if target.kind == "hf" else "reference", config, tensors.meta


def check_export(target: Target) -> str:
    """Check that exactly the model's tensors are there, complete and in their shapes; returns what was checked.

    Raises:
        CorruptError: something is missing or damaged; names it.
    """
    kind, config, tensors = _opened(target)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = expected_shapes(config, kind)
    for name in expected.keys() | shapes.keys():
        if shapes.get(name) != expected.get(name):
            raise CorruptError(
                f"{target.path} has {name} of shape {shapes.get(name) or 'none'} where its model has"
                f" {expected.get(name) or 'none'}; copy it again"
            )
    archives = [file for file in weight_files(target.path) if file.suffix in PICKLE_SUFFIXES]
    with reading(sum(file.stat().st_size for file in archives)) as advance:
        for file in archives:
            with file.open("rb") as stream:
                check_archive(file, "its weights", stream)
            advance(file.stat().st_size)
    sums = "the CRC-32 of their bytes" if archives else "safetensors have no checksum of their bytes"
    return f"{plural(len(expected), 'tensor')} by name, shape and place; {sums}"
