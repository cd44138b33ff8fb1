"""Puts the stand-in in the place of a GPU: a closed list of patches, each with its reason.

It goes into processes of its own: where it is installed, torch says that there is a GPU. With the folder `site` beside
this file on PYTHONPATH, every process has it.
"""

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.engine_on_cpu import extension

NAME = "stand-in"
"""Of the GPU that torch then reports."""
HOPPER, BLACKWELL = (9, 0), (10, 0)
GIB = 2**30
RESET_PEAK = "5"  # what /proc/self/clear_refs expects for it


def install_blackwell() -> None:
    """`install` for what only Blackwell has: blocks of 32 in hardware."""
    install(BLACKWELL)


def install(capability: tuple[int, int] = HOPPER) -> None:
    """Make Transformer Engine importable and usable here, as on a GPU of that compute capability.

    Raises:
        RuntimeError: like `report_a_gpu` and `install_engine`.
    """
    report_a_gpu(capability)
    install_engine()


def install_engine() -> None:
    """The part of `install` that imports megatron-core and the Engine, which takes seconds.

    Raises:
        RuntimeError: megatron-core or the Engine was imported before.
    """
    if early := [name for name in ("megatron.core", "transformer_engine") if name in sys.modules]:
        raise RuntimeError(f"{early[0]} was imported before the stand-in was installed")
    _set_environment()
    _load_stand_in()
    _pretend_in_the_engine()
    _adapt_megatron()
    _adapt_engine()


def _set_environment() -> None:
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # the Engine's package then loads no CUDA library when it is imported
    os.environ["NVTE_TORCH_COMPILE"] = "0"  # else element-wise functions go through torch's compiler, which needs gcc


def _load_stand_in() -> None:
    """The Engine imports its extension by name once its loader has run, which looks for a shared library.

    The loader's module is imported by itself, so that it can be replaced before the package imports the rest.
    """
    sys.modules["transformer_engine_torch"] = extension.build()
    package = importlib.util.find_spec("transformer_engine")
    assert package is not None and package.origin is not None
    location = Path(package.origin).parent / "common" / "__init__.py"
    spec = importlib.util.spec_from_file_location("transformer_engine.common", location, submodule_search_locations=[])
    assert spec is not None and spec.loader is not None
    common = importlib.util.module_from_spec(spec)
    common.__path__ = [str(location.parent)]
    sys.modules[spec.name] = common
    spec.loader.exec_module(common)
    common.load_framework_extension = lambda _framework: None  # type: ignore[attr-defined]
    importlib.import_module("transformer_engine").common = common  # type: ignore[attr-defined]


def report_a_gpu(capability: tuple[int, int] = HOPPER) -> None:
    """The part of `install` that torch alone needs.

    Raises:
        RuntimeError: there is a usable GPU, or the Engine is missing, or another version.
    """
    from megatron_fanformer.runtime import cuda_on_cpu

    if torch.cuda.is_available():
        raise RuntimeError("there is a usable GPU: Transformer Engine needs no stand-in")
    extension.real_extension()
    sys.path.append(str(extension.ENGINE))
    os.environ["CUDA_VISIBLE_DEVICES"] = NAME  # no real one is, and this one is not hidden: see `is_available` below
    cuda_on_cpu.map_cuda()
    cuda: Any = torch.cuda
    properties = SimpleNamespace(
        name=NAME,
        uuid=NAME,  # by which no driver lists it
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
        total_memory=80 * GIB,
    )
    # Every check of the Engine, of megatron-core and of this project. What runs on the CPU hides GPUs, this one too.
    cuda.is_available = lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    cuda.get_device_capability = lambda *_: capability  # which recipes and kernels there are
    cuda.get_device_properties = lambda *_: properties  # the products' workspace
    cuda.get_device_name = lambda *_: NAME
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.is_current_stream_capturing = lambda: False  # CUDA graphs
    cuda.empty_cache = lambda: None
    # Its memory is this process's: the benchmarks divide by it.
    cuda.memory_allocated = cuda.memory_reserved = lambda *_: _own_memory("VmRSS")
    cuda.max_memory_allocated = cuda.max_memory_reserved = lambda *_: _own_memory("VmHWM")
    cuda.reset_peak_memory_stats = lambda *_: Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    cuda.Event = _TimedEvent  # the benchmarks
    version: Any = torch.version
    version.cuda = "13.0"  # blockwise FP8 asks for 12.9
    tensor: Any = torch.Tensor
    tensor.pin_memory = lambda self, *_: self  # the loader's batches
    tensor.record_stream = lambda self, *_: None
    tensor.to = _to_cpu(tensor.to)  # tests and benchmarks; the package asks for `torch_device`
    torch.Generator = _CPUGenerator  # type: ignore[misc]  # likewise
    torch.set_num_threads(1)  # a run on a GPU leaves them alone; here the cores are busy with other ranks


def _own_memory(field: str) -> int:
    """Bytes of resident memory, by the field's name in the kernel's report."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


class _TimedEvent:
    """An event of a device that has done everything when it is recorded."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._seconds = 0.0

    def record(self, *_args: Any) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: "_TimedEvent") -> float:
        """Milliseconds."""
        return 1e3 * (end._seconds - self._seconds)

    def _nothing(self, *_args: Any) -> None: ...

    synchronize = wait = _nothing

    def query(self) -> bool:
        return True


class _CPUGenerator(torch.Generator):
    """Also where a GPU's is asked for."""

    def __new__(cls, _device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu")


def _to_cpu(to: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Tensor.to, for which a GPU is the CPU."""

    def is_gpu(value: Any) -> bool:
        return isinstance(value, (str, torch.device)) and str(value).startswith("cuda")

    def to_cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple("cpu" if is_gpu(value) else value for value in args)
        return to(self, *args, **{name: "cpu" if is_gpu(value) else value for name, value in kwargs.items()})

    return to_cpu


def _pretend_in_the_engine() -> None:
    """The Engine refuses tensors that are not on a GPU. For everybody else they are where they are: on the CPU."""
    plain = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]

    def is_cuda(self: torch.Tensor) -> bool:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return caller.startswith("transformer_engine.") or plain(self)

    torch.Tensor.is_cuda = property(is_cuda)  # type: ignore[assignment,method-assign]


def _adapt_megatron() -> None:
    """megatron-core on a CPU, as the package itself adapts it, but with the Engine, and not for a GPU that ranks share.

    Buckets are reduced as by NCCL: all in one call, beside backward too.
    """
    from megatron_fanformer.runtime import megatron_cpu, parallel

    megatron_cpu.adapt(with_engine=True)
    parallel.reduce_one_bucket_a_call = lambda: None


class _AwaitedOnce:
    """A request of gloo that may be waited for again, as NCCL's may: gloo itself would wait for another message."""

    def __init__(self, request: Any) -> None:
        self._request: Any = request

    def wait(self) -> None:
        if self._request is not None:
            self._request.wait()
        self._request = None


class _OneByOne:
    """Several collectives that NCCL starts as one: gloo, which cannot, has done each when the next begins."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __enter__(self) -> "_OneByOne":
        return self

    def __exit__(self, *_error: object) -> None: ...

    def wait(self) -> None: ...


def _adapt_engine() -> None:
    """The Engine's random states are of CUDA's generators; it waits twice for a request, and joins collectives."""
    from transformer_engine.pytorch import distributed
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel

    exchange = context_parallel.flash_attn_p2p_communicate
    context_parallel.flash_attn_p2p_communicate = lambda *args: [_AwaitedOnce(request) for request in exchange(*args)]
    torch.distributed._coalescing_manager = _OneByOne  # type: ignore[assignment]
    distributed._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    distributed._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    _forget_groups(distributed)


def _forget_groups(distributed: Any) -> None:
    """The Engine keeps every group that it was asked the size of; one of gloo has threads, hundreds after many jobs."""
    destroy = torch.distributed.destroy_process_group

    def destroy_and_forget(*args: Any, **kwargs: Any) -> None:
        distributed.get_distributed_world_size.cache_clear()
        distributed.get_distributed_rank.cache_clear()
        destroy(*args, **kwargs)

    torch.distributed.destroy_process_group = destroy_and_forget
