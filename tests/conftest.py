"""What all tests share: megatron-core made ready for the CPU, the pool of ranks, documents and tokenizers."""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_fanformer.data.tokenizer import train_sentencepiece
from megatron_fanformer.prepare.documents import read_documents
from megatron_fanformer.processes import SAVE_SIGNAL, STOP_SIGNALS
from megatron_fanformer.runtime import device
from megatron_fanformer.runtime.rank_pool import RankPool
from tests.small_runs import collect_groups

MANY_MODULES = 50
POOLS = {"rank_pool", "engine_pool"}

REFERENCE = Path(__file__).parent / "reference"
SAMPLES = Path(__file__).parent / "samples"

is_worker = "PYTEST_XDIST_WORKER" in os.environ
# `pytest tests/gpu` wants to see it; pytest-xdist's workers do as the process that started them.
if not (is_worker or any("tests/gpu" in argument for argument in sys.argv[1:])):
    device.hide_gpus()
device.quieten_libraries()
# Of torch here and in all that is started: models are tiny, and the cores busy with ranks and other test processes.
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Called as soon as this file is read. A process that only hands tests to pytest-xdist's workers needs no torch."""
    options = pluginmanager.get_plugin("pytestconfig").known_args_namespace
    if is_worker or options.collectonly or not getattr(options, "numprocesses", None):
        make_ready()


def make_ready() -> None:
    """What comes before megatron-core's first import, which takes seconds like the tests' own."""
    gc.disable()  # until all are collected: what is imported stays
    from megatron_fanformer.runtime import megatron_cpu

    megatron_cpu.install()


@pytest.hookimpl(trylast=True)  # of those that were chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that use ranks first: the others, which take less each, even out when the workers end."""
    use_ranks = {item.path for item in items if POOLS & set(item.fixturenames)}
    items.sort(key=lambda item: item.path not in use_ranks)


def pytest_collection_finish() -> None:
    freeze()
    # A child that collects a process group which its parent left would wait for threads that a fork does not have.
    os.register_at_fork(after_in_child=gc.freeze)
    gc.enable()


frozen_modules = 0


def freeze() -> None:
    """What is imported stays: no collection is to look through it again."""
    global frozen_modules
    gc.collect()
    gc.freeze()
    frozen_modules = len(sys.modules)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or triton, of which nothing would be collected, writes dozens of lines about it behind the results


@pytest.fixture(autouse=True)
def environment_restored() -> Iterator[None]:
    """A run in this process sets what its libraries read, and what starts later would inherit that."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def groups_let_go() -> Iterator[None]:
    yield
    collect_groups()
    if len(sys.modules) > frozen_modules + MANY_MODULES:
        freeze()


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A test may hold signals as a command's process does; the commands that later tests start would inherit that."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handlers = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, SAVE_SIGNAL)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, held)


@pytest.fixture
def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whom the system does not know, as in a container that is started under any number."""
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


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
def forked_workers() -> None:
    """Workers of `prepare` in this process are forked off a server that has imported all: see `prepare/forked`."""
    from megatron_fanformer.prepare import pipeline

    pipeline.CONTEXT = multiprocessing.get_context("forkserver")
    pipeline.CONTEXT.set_forkserver_preload(["tests.prepare.forked"])
    with mock.patch.dict(os.environ, PYTHONPATH=str(Path(__file__).parents[1])):
        forkserver.ensure_running()


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
