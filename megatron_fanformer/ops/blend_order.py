"""The order in which a blend of many sources is drawn: megatron-core's own, computed by `blend_order.cpp`.

For 2,000 sources it takes a tenth of the time (docs/lab-log.md). Where it cannot be built, or another machine's
compiler may have fused operations of megatron-core's, megatron-core does it.
"""

import ctypes
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.ops.libraries import build_library, find_compiler

SOURCE = Path(__file__).with_name("blend_order.cpp")
MACHINE = "x86_64"  # for which megatron-core is built without fused operations
OPTIONS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC")  # unfused: errors round as its own do


def fill_blend_order(weights: Sequence[float], source: np.ndarray, number: np.ndarray, *, cache: Path) -> bool:
    """Fill in the source of each sample, and how many samples of it come before; returns whether that can be done here.

    Args:
        weights: of the sources, which sum to 1.
        source: [samples] int16.
        number: [samples] int64.
        cache: a folder of this user's alone, for the library.
    """
    compiler = find_compiler()
    if compiler is None or (platform.system(), platform.machine()) != ("Linux", MACHINE):
        return False
    try:
        library = build_library("blend-order", [SOURCE], OPTIONS, headers=[], compiler=compiler, cache=cache)
        function: Any = ctypes.CDLL(str(library)).blend_order
    except (OSError, subprocess.SubprocessError):
        return False
    values = np.array(weights, np.float64)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (values, source, number)]
    function(pointers[0], ctypes.c_int32(len(values)), ctypes.c_int64(len(source)), *pointers[1:])
    return True
