"""The module `transformer_engine_torch` made of this folder's functions, checked against the real one's signatures."""

import enum
import importlib.metadata
import inspect
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engine_on_cpu import attention, fp8, norms, optimizer, products, rotary, versions

ENGINE = Path(sys.prefix) / "engine"
"""Where `make install` puts the Engine's Python, out of the way of everything that runs without it."""
VERSION = "2.20.2"
SIGNATURES = Path(__file__).parent / f"extension-{VERSION}.json"
"""Names, values of enumerations and signatures of the real extension, from its own docstrings."""

SOFTMAXES = ("", "masked_", "upper_triang_masked_", "aligned_causal_masked_")
GROUPS: dict[types.ModuleType, tuple[str, ...]] = {
    products: ("generic_gemm",),
    norms: ("rmsnorm_fwd", "rmsnorm_bwd"),
    rotary: ("fused_rope_forward", "fused_rope_backward", "fused_qkv_rope_forward", "fused_qkv_rope_backward"),
    attention: (
        "get_fused_attn_backend",
        "fused_attn_fwd",
        "fused_attn_bwd",
        "convert_thd_to_bshd",
        "convert_bshd_to_thd",
        *(f"scaled_{kind}softmax_{way}" for kind in SOFTMAXES for way in ("forward", "backward")),
    ),
    fp8: (
        "quantize",
        "dequantize",
        "bgrad_quantize",
        "fp8_transpose",
        "swap_first_dims",
        "compute_amax",
        "create_empty_quantized_tensor",
        "fused_amax_and_scale_update_after_reduction",
    ),
    optimizer: ("multi_tensor_adam", "multi_tensor_scale", "multi_tensor_scale_tensor", "multi_tensor_l2norm"),
    versions: ("get_cublasLt_version", "get_cudnn_version", "get_num_cublas_streams"),
}
"""What is there, by group; every other function raises by name."""


def real_extension() -> dict[str, Any]:
    """What the real extension has; raises RuntimeError if the installed Engine is another version, or missing."""
    found = next(iter(importlib.metadata.distributions(name="transformer-engine", path=[str(ENGINE)])), None)
    if found is None:
        raise RuntimeError(f"Transformer Engine's Python is not in {ENGINE}; `make install` puts it there")
    if found.version != VERSION:
        raise RuntimeError(
            f"transformer-engine {found.version} is installed, but the stand-in is of {VERSION}; record the signatures "
            f"of the new extension's functions, and compare them with {SIGNATURES.name}"
        )
    return json.loads(SIGNATURES.read_text())


def implemented() -> dict[str, Callable[..., Any]]:
    """The functions that are there, by name."""
    return {name: getattr(module, name) for module, names in GROUPS.items() for name in names}


def build() -> types.ModuleType:
    """The stand-in as a module."""
    real, there = real_extension(), implemented()
    module = types.ModuleType("transformer_engine_torch")
    for name, members in real["enums"].items():
        setattr(module, name, enum.IntEnum(name, members))
    for name in real["classes"]:
        setattr(module, name, type(name, (), {}))
    for name in real["functions"]:
        setattr(module, name, there[name] if name in there else _missing(name))
    return module


def _missing(name: str) -> Callable[..., Any]:
    def missing(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{name} is not in the stand-in (tests/engine_on_cpu)")

    return missing


def signature_differences() -> list[str]:
    """How the functions here differ from the real ones' signatures, one line each."""
    real, found = real_extension()["functions"], []
    for name, function in implemented().items():
        if name not in real:
            found.append(f"{name}: the extension has none")
            continue
        theirs = _parameters(real[name])
        ours = [
            parameter
            for parameter in inspect.signature(function).parameters.values()
            if not (name == "quantize" and parameter.name == "dtype")  # for `norms`, which calls it here
        ]
        if len(ours) != len(theirs):
            found.append(f"{name}: {len(ours)} parameters, and the extension has {len(theirs)}")
        for mine, (their_name, has_default) in zip(ours, theirs, strict=False):
            if not their_name.startswith("arg") and mine.name != their_name:
                found.append(f"{name}: {mine.name} is called {their_name}")
            if (mine.default is not inspect.Parameter.empty) != has_default:
                found.append(f"{name}: {mine.name} has {'no ' * (not has_default)}default there")
    return found


def _parameters(signature: str) -> list[tuple[str, bool]]:
    """Names of a docstring's signature, and whether each has a default."""
    text = signature[signature.index("(") + 1 : signature.rindex(") ->")]
    depth, current, parts = 0, "", []
    for character in text + ",":
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return [(part.split(":")[0].strip(), "=" in part) for part in parts if part and part != "*"]
