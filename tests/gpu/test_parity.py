"""The parity command on GPUs, with whatever layers are there; skipped where there is no GPU."""

from pathlib import Path

import pytest
import torch

from megatron_fanformer.runtime.rank_pool import RankPool
from tests.gpu.making import BACKEND, needs_gpu
from tests.parity.test_parity import compare, write_config

pytestmark = needs_gpu

# By the number of GPUs that they need; NCCL wants one a rank.
LAYOUTS = {
    1: ("distributed_optimizer=true", "recompute=full", "recompute=selective"),
    2: ("tp=2", "tp=2,sp=true", "tp=2,sp=true,fan=sequence", "pp=2", "pp=2,vpp=2", "cp=2", "dp=2"),
    4: ("tp=2,pp=2,sp=true", "tp=2,cp=2", "dp=2,pp=2,distributed_optimizer=true,overlap=true"),
}
# Over gloo ranks may share a GPU. It has no messages of GPU tensors from rank to rank, so no stages and no rings.
SHARING = ("tp=2", "tp=2,sp=true", "tp=2,sp=true,fan=sequence", "dp=2", "tp=2,dp=2,distributed_optimizer=true")


def assert_same(folder: Path, layouts: tuple[str, ...], dtype: str, backend: str | None) -> None:
    file = write_config(folder, runtime={"device": "cuda", "distributed_backend": backend})
    with RankPool("cuda", backend=backend) as pool:
        compare(pool, file, *layouts, steps=5, dtype=dtype, device="cuda").check()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_layouts_on_gpus_of_their_own(tmp_path: Path, dtype: str) -> None:
    count = torch.cuda.device_count()
    layouts = [layout for needed, layouts in LAYOUTS.items() if needed <= count for layout in layouts]
    # The Engine has no attention over a split sequence in float32.
    assert_same(tmp_path, tuple(text for text in layouts if dtype == "bf16" or "cp=" not in text), dtype, BACKEND)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_layouts_whose_ranks_share_gpus(tmp_path: Path, dtype: str) -> None:
    assert_same(tmp_path, SHARING, dtype, "gloo")
