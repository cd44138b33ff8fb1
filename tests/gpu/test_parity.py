"""The parity command on GPUs, with whatever layers are there; skipped where there is no GPU."""

from pathlib import Path

import pytest
import torch

from megatron_fanformer.parity.run import ParityConfig, run_parity
from tests.parity.test_parity import write_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

# By the number of GPUs that they need; NCCL wants one a rank.
LAYOUTS = {
    1: ("distributed_optimizer=true", "recompute=full", "recompute=selective"),
    2: ("tp=2", "tp=2,sp=true", "tp=2,sp=true,fan=sequence", "pp=2", "pp=2,vpp=2", "cp=2", "dp=2"),
    4: ("tp=2,pp=2,sp=true", "tp=2,cp=2", "dp=2,pp=2,distributed_optimizer=true,overlap=true"),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_layouts_on_gpus(tmp_path: Path, dtype: str) -> None:
    count = torch.cuda.device_count()
    layouts = tuple(layout for needed, layouts in LAYOUTS.items() if needed <= count for layout in layouts)
    run_parity(ParityConfig(file=write_config(tmp_path), layouts=layouts, steps=5, dtype=dtype, device="cuda")).check()
