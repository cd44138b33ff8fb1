"""Number formats by their names in configurations and commands; apart from those, which import no torch."""

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
