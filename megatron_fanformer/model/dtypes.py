"""The number formats by the names that configurations and commands have; apart from these, which read no torch."""

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
