"""This project's kernels for a CPU on ARM64, of which only an emulator is at hand: a harness in C++, without Python.

What the harness says is worth something only if it holds kernels that are right on this machine, and notices faults.
"""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_fanformer.ops import cpu_kernels

pytestmark = pytest.mark.full
HARNESS = Path(__file__).with_name("cpu_kernels_check.cpp")
ARM_COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = ("qemu-aarch64-static", "-cpu", "max,sve-default-vector-length=16")  # as wide as those of NVIDIA's Grace
MACHINES = {
    "native": (),
    "arm": ("-march=armv8-a", "-static"),  # what every ARM64 has
    "arm with SVE2": ("-march=armv9-a", "-static"),
}
FAULTS = {
    "bf16 cut off": ("native", "(bits + 0x7fff + ((bits >> 16) & 1)) >> 16", "bits >> 16"),
    "a query without its own key": ("native", "position + 1 - first", "position - first"),
    "a sum in float32": (
        "native",
        "double sum = 0;\n#pragma omp simd reduction",
        "float sum = 0;\n#pragma omp simd reduction",
    ),
    "half of a word": ("arm", " + Lanes(a & later) * Lanes(b & later)", ""),
}


def run_harness(machine: str, folder: Path, *, instead: tuple[str, str] = ("", "")) -> subprocess.CompletedProcess[str]:
    """Build the kernels, one text of theirs replaced by another, and hold them to float64 on three threads."""
    compiler, emulator = (ARM_COMPILER, EMULATOR) if machine != "native" else ("c++", ())
    for needed in (compiler, *emulator[:1]):
        if shutil.which(needed) is None:
            pytest.skip(f"{needed} is missing (Debian: g++-aarch64-linux-gnu, qemu-user-static)")
    for source in (cpu_kernels.HEADER, *cpu_kernels.SOURCES):
        (folder / source.name).write_text(source.read_text().replace(*instead))
    common = [each for each in cpu_kernels.OPTIONS if machine == "native" or not each.startswith("-m")]
    sources = [folder / source.name for source in cpu_kernels.SOURCES] + [HARNESS]

    def build(source: Path) -> Path:
        made = folder / f"{source.stem}.o"
        subprocess.run([compiler, *common, *MACHINES[machine], "-c", source, "-o", made], check=True)
        return made

    with ThreadPoolExecutor() as pool:
        parts = list(pool.map(build, sources))
    program = folder / "check"
    subprocess.run([compiler, "-fopenmp", *MACHINES[machine], *parts, "-o", program], check=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    return subprocess.run([*emulator, program], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("machine", MACHINES)
def test_every_kernel_is_right(machine: str, tmp_path: Path) -> None:
    result = run_harness(machine, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "BEYOND" not in result.stdout
    for kernel in ("SwiGLU", "RMSNorm", "rotation", "softmax", "attention", "queries' gradient", "product"):
        for dtype in ("float32", "bf16"):
            assert f"{dtype} {kernel}" in result.stdout


@pytest.mark.parametrize("fault", FAULTS)
def test_the_harness_notices(fault: str, tmp_path: Path) -> None:
    machine, right, wrong = FAULTS[fault]
    assert any(right in source.read_text() for source in (cpu_kernels.HEADER, *cpu_kernels.SOURCES))
    result = run_harness(machine, tmp_path, instead=(right, wrong))
    assert result.returncode == 1
    assert "BEYOND" in result.stdout
