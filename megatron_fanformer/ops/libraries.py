"""Libraries of this project's C++, which the machine's compiler builds once for this CPU."""

import functools
import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_fanformer.durable_files import publish, temporary_name

COMPILERS = ("c++", "g++", "clang++")
CPU_LINES = ("flags", "Features", "CPU implementer", "CPU part")
"""Beginnings of the lines in /proc/cpuinfo that decide what the compiler builds for; ARM's are the last three."""
MOST_SECONDS = 120


def find_compiler() -> Path | None:
    """Return the first of COMPILERS that there is."""
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    return None if found is None else Path(found)


def build_library(
    name: str, sources: Sequence[Path], options: Sequence[str], *, headers: Sequence[Path], compiler: Path, cache: Path
) -> Path:
    """Return the library of these sources, options, compiler and CPU. Processes that start together may all build it:
    the same file.

    Args:
        name: its file's begins with it.
        cache: a folder of this user's alone, in which the library is, or is put.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be built.
    """
    found = compiler.resolve()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = sorted({line for line in lines if line.startswith(CPU_LINES)})
    texts = [each.read_text(encoding="utf-8") for each in (*headers, *sources)]
    named = f"{options} {found} {found.stat().st_mtime_ns} {flags} {texts}"
    library = cache / f"{name}-{hashlib.sha256(named.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = temporary_name(library)
        parts = [partial.with_name(f"{partial.name}-{source.stem}.o") for source in sources]
        run = functools.partial(subprocess.run, check=True, capture_output=True, text=True, timeout=MOST_SECONDS)
        try:
            with ThreadPoolExecutor() as pool:
                pairs = zip(sources, parts, strict=True)
                list(pool.map(run, ([str(compiler), *options, "-c", f"{cpp}", "-o", f"{o}"] for cpp, o in pairs)))
            run([str(compiler), "-shared", *map(str, parts), "-o", str(partial)])
            publish(partial, library)
        finally:
            for each in (*parts, partial):
                each.unlink(missing_ok=True)
    return library
