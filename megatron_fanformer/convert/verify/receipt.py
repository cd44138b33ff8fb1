"""The receipt of a conversion: what was written is read back from its files, and compared with the source.

    names        every tensor of the source was used, and the destination's tensors are exactly its model's
    round trip   converted back, they are the source's, bit for bit
    logits       the models of both sides, run in float32 on fixed prompts, agree

The round trip cannot see a fault that is in both directions of a transform; the logits can. What a smaller vocabulary
padding leaves out is not a fault: it is reported (`vocabulary`).
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megatron_fanformer.checkpoint.manifest import versions
from megatron_fanformer.convert.checkpoints import Checkpoint
from megatron_fanformer.convert.name_table import convert, listed, names_in, rows_of
from megatron_fanformer.convert.verify.models import UsedTensors, logits_of
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import FanformerError
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.terminal import table

# Few: a 1B model takes seconds per pass on a laptop's cores.
PROMPTS, PROMPT_TOKENS = 4, 8
PROMPT_SEED = 20_250_211
# Of the largest logit. Rounding in float32 makes 1e-6 to 1e-5 (measured on the reference cases and at 1B); exchanging
# the query and key of one head, the smallest of the planted faults, 1e-3 and more.
LOGITS_TOLERANCE = 1e-4

Json: TypeAlias = dict[str, Any]


def verify(source: Checkpoint, used: set[str], destination: Checkpoint, grid: RankGrid) -> Json:
    """Return all checks by name; each says whether it `passed`, and what it saw.

    Args:
        used: the names of the source's tensors that the conversion has read.
        destination: reopened from its files.
    """
    written = UsedTensors(destination)
    checks = {
        "round_trip": _round_trip(source, destination),
        "logits": _logits(UsedTensors(source, _dtype(source, destination)), written, grid),
    }
    return {"names": _names(source, used, destination, written.used), **checks}


def failures(checks: Json) -> str:
    """Return what the failed checks say, in one line; empty where none failed."""
    return "; ".join(f"{name}: {check['problem']}" for name, check in checks.items() if not check["passed"])


def seen(checks: Json) -> list[str]:
    """Return what checks that have passed saw, as a table for a terminal."""
    names, round_trip, logits = (checks[name] for name in ("names", "round_trip", "logits"))
    tensors = f"{names['source_tensors']:,} tensors"
    rounded = f", rounded to {round_trip['rounded_to'].removeprefix('torch.')}" if round_trip["rounded_to"] else ""
    rows = {
        "names": f"all {tensors} used; the {names['destination_tensors']:,} written are the model's",
        "round trip": f"converted back, the {tensors} are the source's, bit for bit{rounded}",
        "logits": f"differ by {logits['max_abs_error']:.1e} at most; {logits['allowed']:.1e} is allowed",
    }
    return table(("check", "passed"), rows.items(), align="ll")


# -- names


def _names(source: Checkpoint, used: set[str], destination: Checkpoint, run: set[str]) -> Json:
    """`run` names what the destination's own model requested, which is independent of the table."""
    unused = [name for name in source.tensors if name not in used]
    unexpected = [name for name in destination.tensors if run and name not in run]
    problems = [
        f"{text}: {listed(names)}"
        for text, names in (("unused", unused), ("written, but not the model's", unexpected))
        if names
    ]
    return {
        "passed": not problems,
        "problem": "; ".join(problems),
        "source_tensors": len(source.tensors),
        "destination_tensors": len(destination.tensors),
        "unused": unused,
        "not_the_models": unexpected,
    }


# -- round trip


def _dtype(source: Checkpoint, destination: Checkpoint) -> torch.dtype | None:
    """Return what the source is rounded to before it is compared; None where nothing was rounded."""
    before, after = ({tensor.dtype for tensor in side.tensors.meta.values()} for side in (source, destination))
    return None if before == after or len(after) != 1 else after.pop()


def _round_trip(source: Checkpoint, destination: Checkpoint) -> Json:
    dtype = _dtype(source, destination)
    vocabulary = {
        name
        for row, layer in rows_of(source.config)
        if row.is_vocabulary
        for name in names_in(row, layer, source.format)
    }
    rows = min(_vocabulary_rows(source), _vocabulary_rows(destination))
    different = []
    try:
        back = convert(
            destination.tensors, destination.config, destination.format, source.format, target_config=source.config
        )
        for name, returned in back.items():
            original = source.tensors[name]
            original = original if dtype is None else original.to(dtype)
            if name in vocabulary:
                original, returned = original[:rows], returned[:rows]
            if not _same_bits(original, returned):
                different.append(name)
    except (FanformerError, RuntimeError) as error:
        return {"passed": False, "problem": _reason(error), "different": different}
    problem = f"came back different: {listed(different)}" if different else ""
    return {
        "passed": not different,
        "problem": problem,
        "different": different,
        "rounded_to": str(dtype) if dtype else None,
    }


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.dtype.itemsize]
    return torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))


def _vocabulary_rows(checkpoint: Checkpoint) -> int:
    row = next(row for row, _ in rows_of(checkpoint.config) if row.is_vocabulary)
    (name,) = names_in(row, None, checkpoint.format)
    return checkpoint.tensors.meta[name].shape[0] if name in checkpoint.tensors else 0


def vocabulary(source: Checkpoint, destination: Checkpoint) -> Json:
    """Return the embedding's rows on both sides, how many were left out or added, and whether what was left out was
    zero.
    """
    before, after = _vocabulary_rows(source), _vocabulary_rows(destination)
    dropped = {}
    for row, layer in rows_of(source.config) if after < before else ():
        if row.is_vocabulary:
            (name,) = names_in(row, layer, source.format)
            dropped[name] = "zero" if not source.tensors[name][after:].any() else "not zero"
    return {
        "tokens": source.config.vocab_size,
        "source_rows": before,
        "destination_rows": after,
        "dropped_rows": max(0, before - after),
        "dropped_rows_were": dropped,
        "added_rows": max(0, after - before),
    }


# -- logits


def prompts(vocab_size: int) -> Tensor:
    """Return the fixed prompts [b, s]: drawn ids, among them the first and the last of the vocabulary."""
    generator = torch.Generator().manual_seed(PROMPT_SEED)
    ids_bs = torch.randint(vocab_size, (PROMPTS, PROMPT_TOKENS), generator=generator)
    ids_bs[0, 0], ids_bs[1, 1] = 0, vocab_size - 1
    return ids_bs


def _logits(source: UsedTensors, destination: UsedTensors, grid: RankGrid) -> Json:
    try:
        ids_bs = prompts(min(side.checkpoint.config.vocab_size for side in (source, destination)))
        before = logits_of(source, grid)(ids_bs)  # one model at a time: two would need twice the memory
        after = logits_of(destination, grid)(ids_bs)
    except (FanformerError, RuntimeError, IndexError) as error:
        return {"passed": False, "problem": _reason(error)}
    columns = min(before.shape[-1], after.shape[-1])
    difference = (before[..., :columns] - after[..., :columns]).abs().max().item()
    allowed = LOGITS_TOLERANCE * before[..., :columns].abs().max().item()
    return {
        "passed": difference <= allowed,  # not so for NaN
        "problem": "" if difference <= allowed else f"they differ by {difference:.1e}, and {allowed:.1e} is allowed",
        "max_abs_error": difference,
        "allowed": allowed,
        "prompts": [PROMPTS, PROMPT_TOKENS],
        "columns": columns,
    }


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# -- the report


def report(
    source: Checkpoint, destination: Checkpoint, checks: Json | None, rows: Json, published: Path, *, hashed: bool
) -> Json:
    """Return the receipt as JSON: checks (None where none were requested), hashes, shapes, versions.

    Args:
        rows: what `vocabulary` returns.
        published: the name that the destination's folder will have, or would have had.
        hashed: whether to read the files once more for their SHA-256.
    """
    return {
        "passed": None if checks is None else not failures(checks),
        "checks": checks,
        "vocabulary": rows,
        "source": side(source, source.path, hashed),
        "destination": side(destination, published, hashed),
        "versions": versions(),
    }


def side(checkpoint: Checkpoint, path: Path, hashed: bool) -> Json:
    """Return what a receipt says of one of its checkpoints: its model, files and tensors."""
    files = checkpoint.weight_files()
    with ThreadPoolExecutor(2) as pool:
        hashes = list(pool.map(sha256_of, files)) if hashed else [None] * len(files)
    return {
        "format": checkpoint.format,
        "path": str(path),
        "model": asdict(checkpoint.config),
        "files": {
            file.name: {"bytes": file.stat().st_size, "sha256": sha256}
            for file, sha256 in zip(files, hashes, strict=True)
        },
        "tensors": {
            name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            for name, tensor in checkpoint.tensors.meta.items()
        },
        "not_converted": list(checkpoint.not_converted),
    }
