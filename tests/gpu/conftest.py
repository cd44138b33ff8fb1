"""Readies the libraries where these tests are run alone, as tools/gpu_queue.py does: few packages may be there."""

import pytest

from megatron_fanformer.runtime import device

device.prepare_libraries()


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.gpu.making import write_learnable_tokens

    return write_learnable_tokens(tmp_path_factory.mktemp("tokens") / "learnable")


@pytest.fixture(scope="session")
def bf16_losses(tokens: str, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of a run as `gpu_run` has it, on one rank."""
    from tests.gpu.making import finished, gpu_run

    folder = tmp_path_factory.mktemp("bf16")
    return finished(gpu_run(tokens, folder / "run"), folder / "config.yaml")
