"""What all tests share: megatron-core made ready for the CPU, the pool of ranks, documents and tokenizers."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fanformer.data.tokenizer import train_sentencepiece
from megatron_fanformer.preparation.document_files import read_documents
from megatron_fanformer.processes import SAVE_SIGNAL, STOP_SIGNALS
from megatron_fanformer.runtime import device, megatron_cpu
from megatron_fanformer.runtime.rank_pool import RankPool

# `pytest -m gpu` and `pytest tests/gpu` want to see it; pytest-xdist's workers do as the process that started them.
if not ("PYTEST_XDIST_WORKER" in os.environ or any("gpu" in argument for argument in sys.argv)):
    device.hide_gpus()
device.quieten_libraries()
megatron_cpu.install()
torch.set_num_threads(1)  # the models are tiny, and the cores busy with ranks and other test processes

MANY_THREADS = 40
MANY_MODULES = 50

REFERENCE = Path(__file__).parent / "reference"
SAMPLES = Path(__file__).parent / "samples"


@pytest.fixture(autouse=True)
def groups_let_go() -> Iterator[None]:
    """A run in this process leaves process groups in cycles, and a gloo group's thread wakes up every 10 ms."""
    modules = len(sys.modules)
    yield
    if len(os.listdir("/proc/self/task")) > MANY_THREADS:
        gc.collect()
    if len(sys.modules) > modules + MANY_MODULES:
        keep_what_is_imported()


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A test may hold signals as a command's process does; the commands that later tests start would inherit that."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handlers = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, SAVE_SIGNAL)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, held)


def pytest_collection_finish() -> None:
    keep_what_is_imported()


def keep_what_is_imported() -> None:
    """A collection looks through it no more: a run makes several, and torch and Megatron take half a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Gloo ranks, kept alive for the whole session."""
    with RankPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def run_on_ranks(rank_pool: RankPool) -> Callable[..., list[Any]]:
    """`run_on_ranks(world_size, function, *arguments)`: the results of all ranks."""
    return rank_pool.run


@pytest.fixture(scope="session")
def sample_files() -> list[Path]:
    return sorted((SAMPLES / "dolma").glob("*.json.gz"))


@pytest.fixture(scope="session")
def sample_texts(sample_files: list[Path]) -> list[str]:
    return [text for file in sample_files for text in read_documents(file) if isinstance(text, str)]


@pytest.fixture(scope="session")
def olmo_tokenizer_file() -> Path:
    return SAMPLES / "tokenizers" / "allenai_gpt-neox-olmo-dolma-v1_5.json"


@pytest.fixture(scope="session")
def small_tokenizer_file(tmp_path_factory: pytest.TempPathFactory, sample_texts: list[str]) -> Path:
    code = ["def f(x):\n    if x:\n        return [x]\n\n" * 20]
    return train_sentencepiece(sample_texts + code, tmp_path_factory.mktemp("tokenizer") / "small", vocab_size=600)
