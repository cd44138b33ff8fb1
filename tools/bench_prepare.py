"""How fast `prepare` is on real text: by stage and end to end, for every backend, and whether its ids are exact.

    python tools/bench_prepare.py --text FOLDER… --work FOLDER --tokenizer tokenizer.json --tokenizer other.model

Text files below the folders become shards in Dolma's form in the work folder, which are kept; `--corpus FILE…` takes
existing shards. Rates are MB (10^6 bytes) of JSON per second: of CPU time (user and system, of all processes), since
shared machines steal time, and of wall time.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

from isal import igzip

from megatron_fanformer.data.manifest import Settings
from megatron_fanformer.data.token_files import token_dtype
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.preparation import encoding
from megatron_fanformer.preparation.assembly import Assembler
from megatron_fanformer.preparation.document_files import DocumentFile, read_documents
from megatron_fanformer.preparation.id_encoders import SMALL_INPUT_BYTES, EncoderChoice, IdEncoder, choose_encoder
from megatron_fanformer.preparation.prepare import tokenizer_record
from megatron_fanformer.preparation.shards import ShardFiles, ShardWriter
from megatron_fanformer.preparation.work_folder import work_folder

# What is collected, by the ends of names: documentation and prose before code.
PROSE = (".md", ".rst", ".txt", ".tex", ".html", ".htm", ".pod", ".adoc", ".org", ".texi")
CODE = (".py", ".rs", ".c", ".h", ".cpp", ".hpp", ".js", ".ts", ".go", ".java", ".pl", ".rb", ".sh", ".css", ".sql")
LARGEST_FILE_BYTES = 2_000_000  # beyond it, tables and dictionaries
SHARD_BYTES = 50_000_000
MB = 1e6
LOOK_SECONDS = 0.05
VERIFIED_AT_ONCE = 64


# -- the corpus


def collect(folders: Sequence[Path], megabytes: float, work: Path) -> list[Path]:
    """Shards of the text files below some folders, no text twice; up to that many MB of JSON."""
    texts: dict[bytes, bytes] = {}
    left = megabytes * MB
    for path, folder in _text_files(folders):
        data = _utf8(path)
        digest = hashlib.sha256(data).digest()
        if not data or digest in texts:
            continue
        name = f"{folder.name}/{path.relative_to(folder)}"
        fields = {"id": name, "text": data.decode(), "source": path.suffix[1:], "metadata": {"bytes": len(data)}}
        texts[digest] = json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        left -= len(texts[digest])
        if left < 0:
            break
    # By digest: an order that is fixed, and mixes the kinds.
    return list(_write_shards((texts[digest] for digest in sorted(texts)), work))


def _text_files(folders: Sequence[Path]) -> Iterator[tuple[Path, Path]]:
    """(file, folder): prose first, then code; each sorted."""
    found = [
        (path, folder)
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.suffix in PROSE + CODE and path.is_file() and not path.is_symlink()
    ]
    yield from sorted(found, key=lambda pair: pair[0].suffix in CODE)


def _utf8(path: Path) -> bytes:
    """What a text file holds; nothing if it is large, unreadable or not UTF-8."""
    with suppress(OSError, UnicodeDecodeError):
        if path.stat().st_size <= LARGEST_FILE_BYTES:
            data = path.read_bytes()
            data.decode()
            return data
    return b""


def _write_shards(lines: Iterable[bytes], work: Path) -> Iterator[Path]:
    work.mkdir(parents=True, exist_ok=True)
    lines = iter(lines)
    for number in count():
        size, shard = 0, []
        for line in lines:
            shard.append(line)
            size += len(line)
            if size >= SHARD_BYTES:
                break
        if not shard:
            return
        path = work / f"shard-{number:03d}.json.gz"
        with igzip.open(path, "wb", compresslevel=2) as file:
            file.writelines(shard)
        yield path


def json_bytes(path: Path) -> int:
    """The size of a shard's lines, not compressed."""
    return sum(len(block) if isinstance(block, bytes) else 0 for block in DocumentFile(path).blocks())


# -- by stage, in one process


class Clock:
    """CPU seconds of this process, by stage; what runs within a stage but has one of its own counts only there."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def stage(self, name: str, within: str | None = None) -> Iterator[None]:
        """Time what runs in the block, and subtract it from the stage around it."""
        began = time.process_time()
        yield
        spent = time.process_time() - began
        self.seconds[name] += spent
        if within is not None:
            self.seconds[within] -= spent


@dataclass(frozen=True)
class _TimedPlan:
    """An encoder plan whose encoder is timed."""

    plan: EncoderChoice
    clock: Clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plan, name)

    def make(self) -> "_TimedEncoder":
        return _TimedEncoder(self.plan.make(), self.clock)


@dataclass(frozen=True)
class _TimedEncoder:
    encoder: IdEncoder
    clock: Clock

    def encode_batch(self, texts: Sequence[bytes]) -> Any:
        with self.clock.stage("tokenizer", within="joining, samples by the exact library"):
            return self.encoder.encode_batch(texts)


def measure_stages(files: Sequence[Path], tokenizer_path: str, backend: Any, folder: Path) -> dict[str, float]:
    """CPU seconds of each stage of the way from files to output, on one thread."""
    clock = Clock()
    with clock.stage("start: loading, holding gigatoken against the exact library"):
        tokenizer = load_tokenizer(tokenizer_path)
        plan = choose_encoder(tokenizer, backend, SMALL_INPUT_BYTES)
        settings = Settings(text_field="text", dtype=token_dtype(tokenizer.vocab_size))
        encoder = encoding.BlockEncoder(_TimedPlan(plan, clock), settings)  # type: ignore[arg-type]
    parse_block = encoding.parse_block

    def timed(*block: Any) -> Any:
        with clock.stage("JSON", within="joining, samples by the exact library"):
            return parse_block(*block)

    prefix = str(folder / "stages")
    with work_folder(prefix) as work, mock.patch.object(encoding, "parse_block", timed):
        assembler = Assembler(prefix, settings, tokenizer_record(tokenizer), work)
        for number, path in enumerate(files):
            record = _measure_file(path, ShardFiles(work.path, number), encoder, clock)
            with clock.stage("output: tokens, index, ledger, SHA-256"):
                assembler.append(record)
        with clock.stage("output: tokens, index, ledger, SHA-256"):
            assembler.finish()
        work.end()
    return dict(clock.seconds)


def _measure_file(path: Path, shard: ShardFiles, encoder: encoding.BlockEncoder, clock: Clock) -> Any:
    file = DocumentFile(path)
    blocks = file.blocks()
    writer = ShardWriter(shard, path)
    for number in count():
        with clock.stage("reading: disk, SHA-256, gunzip"):
            block = next(blocks, b"")  # none is empty
        if block == b"":
            break
        with clock.stage("joining, samples by the exact library"):
            encoded = encoder.encode(number, block)
        with clock.stage("shard: tokens, rows, CRC-32"):
            writer.add(encoded)
    with clock.stage("shard: tokens, rows, CRC-32"):
        return writer.finish(file.bytes_read, file.sha256)


# -- end to end


@dataclass
class EndToEnd:
    """One run of the command."""

    tokenizer: str
    backend: str
    workers: int
    json_bytes: int
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: list[int] = field(default_factory=list)
    """Of each process, the largest first."""
    tokens: int = 0
    tokens_sha256: str = ""


def measure_command(files: Sequence[Path], size: int, tokenizer: str, backend: str, workers: int, folder: Path) -> Any:
    """Run `prepare` as a user does, in processes of its own."""
    result = EndToEnd(Path(tokenizer).name, backend, workers, size)
    prefix = folder / f"{backend}-{workers}"
    command = [sys.executable, "-m", "megatron_fanformer", "prepare", *map(str, files), "--output", str(prefix)]
    command += ["--tokenizer", tokenizer, "--backend", backend, "--workers", str(workers)]
    before, began = children_seconds(), time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    peaks: dict[int, int] = {}
    watch = threading.Thread(target=_watch, args=(process, peaks))
    watch.start()
    if process.wait():
        raise SystemExit(f"prepare ended with exit code {process.returncode}")
    result.wall_seconds, result.cpu_seconds = time.monotonic() - began, children_seconds() - before
    watch.join()
    result.peak_bytes = sorted(peaks.values(), reverse=True)
    manifest = json.loads(Path(f"{prefix}.manifest.json").read_text())
    result.tokens, result.tokens_sha256 = manifest["tokens"], manifest["outputs"][0]["files"][".bin"]["sha256"]
    for path in folder.glob(prefix.name + ".*"):
        path.unlink()
    return result


def children_seconds() -> float:
    """User and system seconds of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _watch(process: "subprocess.Popen[bytes]", peaks: dict[int, int]) -> None:
    """Record the peak resident bytes, as the kernel keeps them, of all processes of a session."""
    while process.poll() is None:
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                if os.getsid(int(folder.name)) == process.pid:
                    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                    peak = int(status.get("VmHWM", "0 kB").split()[0]) * 1024
                    peaks[int(folder.name)] = max(peak, peaks.get(int(folder.name), 0))
        time.sleep(LOOK_SECONDS)


# -- ids


def verify_file(task: tuple[str, Path]) -> tuple[int, int, str | None]:
    """(documents, tokens, where the first difference is) of one shard, with gigatoken and with the exact library."""
    tokenizer_path, path = task
    plan = choose_encoder(load_tokenizer(tokenizer_path), "gigatoken", SMALL_INPUT_BYTES)
    encoder, exact = plan.make(), plan.exact()
    documents = tokens = 0
    texts: list[str] = []
    found = None
    for text in [*read_documents(path), None]:
        if isinstance(text, str):
            texts.append(text)
        if texts and (text is None or len(texts) == VERIFIED_AT_ONCE):
            ids, counts = encoder.encode_batch([one.encode() for one in texts])
            start = 0
            for one, number in zip(texts, counts.tolist(), strict=True):
                if found is None and ids[start : start + number].tolist() != exact.encode(one):
                    found = f"{path}, document {documents + 1}"
                documents, tokens, start = documents + 1, tokens + number, start + number
            texts = []
    return documents, tokens, found


def verify(files: Sequence[Path], tokenizer: str, processes: int) -> dict[str, Any]:
    """Compare the ids of all documents with the exact library's."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        results = []
        for path, result in zip(files, pool.map(verify_file, [(tokenizer, path) for path in files]), strict=True):
            print(f"{path.name}: {result[0]:,} documents, {result[1]:,} tokens: {result[2] or 'equal'}", flush=True)
            results.append(result)
    differences = [found for _, _, found in results if found is not None]
    documents, tokens = sum(result[0] for result in results), sum(result[1] for result in results)
    return {"tokenizer": Path(tokenizer).name, "documents": documents, "tokens": tokens, "differences": differences}


# -- the table


def in_own_process(call: Callable[..., Any], *arguments: Any) -> Any:
    """A call that starts with nothing loaded."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


def print_stages(title: str, size: int, seconds: dict[str, float]) -> None:
    """MB of JSON per CPU second, stage by stage."""
    print(f"\n{title}: one core, {size / MB:.0f} MB of JSON\n{'CPU s':>8}  {'MB/CPU s':>9}  stage")
    for name, spent in seconds.items():
        rate = "" if name.startswith("start") else f"{size / MB / max(spent, 1e-9):9.1f}"
        print(f"{spent:8.2f}  {rate:>9}  {name}")
    working = sum(spent for name, spent in seconds.items() if not name.startswith("start"))
    print(f"{working:8.2f}  {size / MB / max(working, 1e-9):9.1f}  all stages but the start")


def print_command(one: EndToEnd) -> None:
    """The command's rates and its processes' memory."""
    size = one.json_bytes / MB
    print(f"{one.tokenizer}, {one.backend}, end to end with {one.workers} workers: {size:.0f} MB of JSON in", end=" ")
    print(f"{one.wall_seconds:.1f} s, {one.cpu_seconds:.1f} CPU s: {size / one.wall_seconds:.1f} MB/s,", end=" ")
    print(f"{size / one.cpu_seconds:.1f} MB/CPU s; peak MiB of each process", end=" ")
    print(", ".join(str(peak >> 20) for peak in one.peak_bytes), flush=True)


def print_verified(entry: dict[str, Any]) -> None:
    """Where ids differ, or that none does."""
    found = "; ".join(entry["differences"]) or "all ids equal"
    print(f"{entry['tokenizer']}: {entry['documents']:,} documents, {entry['tokens']:,} tokens: {found}", flush=True)


def ratios(results: Sequence[EndToEnd]) -> dict[str, float]:
    """Ratios of gigatoken's rate to the exact library's, end to end with one worker, by tokenizer and library."""
    rates = {(r.tokenizer, r.backend): r.json_bytes / r.cpu_seconds for r in results if r.workers == 1}
    return {
        f"{backend} ({tokenizer})": rates[tokenizer, "gigatoken"] / rate
        for (tokenizer, backend), rate in rates.items()
        if backend != "gigatoken" and (tokenizer, "gigatoken") in rates
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for, and print it; returns 1 if an id differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    corpus = parser.add_mutually_exclusive_group(required=True)
    corpus.add_argument("--text", nargs="+", type=Path, metavar="FOLDER", help="collect text files below these")
    corpus.add_argument("--corpus", nargs="+", type=Path, metavar="FILE", help="existing document files")
    parser.add_argument("--megabytes", type=float, default=300.0, help="of JSON to collect (300)")
    parser.add_argument("--work", type=Path, required=True, help="folder for the shards and the outputs")
    parser.add_argument("--tokenizer", action="append", required=True, help="may be repeated")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2], help="(1 2)")
    parser.add_argument("--exact-files", type=int, default=1, help="files that the slow, exact libraries get (1)")
    parser.add_argument("--verify", action="store_true", help="compare every id with the exact library's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    options = parser.parse_args(arguments)
    files = options.corpus or collect(options.text, options.megabytes, options.work)
    options.work.mkdir(parents=True, exist_ok=True)
    figures = measure_all(files, options)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return int(any(entry["differences"] for entry in figures["verified"]))


def measure_all(files: Sequence[Path], options: argparse.Namespace) -> dict[str, Any]:
    """All figures, printed as they come."""
    sizes = {path: json_bytes(path) for path in files}
    print(f"{len(files)} files, {sum(sizes.values()) / MB:.0f} MB of JSON")
    stages: dict[str, Any] = {}
    commands: list[EndToEnd] = []
    verified: list[dict[str, Any]] = []
    for tokenizer in options.tokenizer:
        library = "tokenizers" if load_tokenizer(tokenizer).path.suffix == ".json" else "sentencepiece"
        for backend, some in (("gigatoken", files), (library, files[: options.exact_files])):
            size = sum(sizes[path] for path in some)
            title = f"{Path(tokenizer).name}, {backend}"
            seconds = in_own_process(measure_stages, some, tokenizer, backend, options.work)
            _remove_stages(options.work)
            stages[title] = {"json_bytes": size, "cpu_seconds": seconds}
            print_stages(title, size, seconds)
            for workers in options.workers:
                commands.append(measure_command(some, size, tokenizer, backend, workers, options.work))
                print_command(commands[-1])
    for name, ratio in ratios(commands).items():
        print(f"gigatoken makes {ratio:.1f} times the MB per CPU second of {name}")
    for tokenizer in options.tokenizer if options.verify else ():
        verified.append(verify(files, tokenizer, max(options.workers)))
        print_verified(verified[-1])
    return {
        "json_bytes": sum(sizes.values()),
        "stages": stages,
        "end_to_end": [asdict(one) for one in commands],
        "ratios": ratios(commands),
        "verified": verified,
        "cores": len(os.sched_getaffinity(0)),
        "outputs": dict(Counter(one.tokens_sha256 for one in commands)),
    }


def _remove_stages(work: Path) -> None:
    for path in work.glob("stages.*"):
        path.unlink()


if __name__ == "__main__":
    sys.exit(main())
