"""A process in which Triton interprets its kernels, for tests that have no GPU."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest


def interpret_kernels() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined, so before triton is imported


@pytest.fixture(scope="package")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """In NumPy, and not in this process: the same kernels are built for a GPU in it."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=interpret_kernels) as pool:
        yield pool
