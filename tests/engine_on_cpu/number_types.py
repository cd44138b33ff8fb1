"""The extension's number types as torch's."""

from typing import Any

import torch

TORCH_TYPES = {
    "kByte": torch.uint8,
    "kInt32": torch.int32,
    "kFloat32": torch.float32,
    "kFloat16": torch.float16,
    "kBFloat16": torch.bfloat16,
    "kFloat8E4M3": torch.float8_e4m3fn,
    "kFloat8E5M2": torch.float8_e5m2,
}


def to_torch(dtype: Any) -> torch.dtype:
    """The torch type of one of the extension's (or of the Engine's own enumeration of them)."""
    return TORCH_TYPES[dtype.name]
