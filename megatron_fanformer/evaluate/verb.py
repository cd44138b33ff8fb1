"""The verb `evaluate`, and its options; imports nothing that is slow."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_fanformer.options import Verb, argument, count, option

BATCH_TOKENS = 8192  # of a micro batch: four of the paper's chunks; the loss head never holds all their logits

# The titles of groups of options in the help.
MEASURED, ANSWERS = "what to measure", "answers that a model writes (gsm8k, humaneval, mbpp)"
RUNTIME, OUTPUT, REQUEST_FILE = "runtime", "output", "request file"
# Options of which others need one.
MODELS, SETS, TASKS = ("checkpoints",), ("perplexity",), ("tasks", "requests")
GREEDY = "answers are greedy; for others export the model and use lm-eval"


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of `evaluate`."""

    checkpoints: tuple[str, ...] = argument((), metavar="CHECKPOINT")
    """A run's folder (its latest checkpoint), its checkpoints/ folder (all of them), one checkpoint, or an exported
    Hugging Face folder."""

    tasks: tuple[str, ...] = option((), metavar="TASK", group=MEASURED)
    """Tasks, groups of tasks, or .jsonl files of your own (default: those of --requests)"""
    requests: Path | None = option(None, metavar="FILE", needs=MODELS, group=MEASURED)
    """Request file, as --prepare writes it (default: --tasks are prepared, and kept in the cache)"""
    limit: int | None = option(None, metavar="N", parse=count, needs=TASKS, group=MEASURED)
    """Take the first N documents of each task (default: all)"""
    perplexity: tuple[str, ...] = option((), metavar="SET", needs=MODELS, group=MEASURED)
    """NAME=PATH of token files (a prefix, .npy, a folder, a glob), or the groups v2-small and v3-small."""
    perplexity_folder: str | None = option(None, metavar="FOLDER", needs=SETS, group=MEASURED)
    """Folder that holds the sets of the groups."""
    chunk_tokens: int | None = option(None, metavar="N", parse=count, needs=SETS, group=MEASURED)
    """Tokens of a chunk (default: the model's seq_length)"""
    limit_tokens: int | None = option(None, metavar="N", parse=count, needs=SETS, group=MEASURED)
    """Take the first N tokens of each set, in whole chunks (default: all)"""
    npy_dtype: Literal["uint16", "uint32"] = option("uint16", group=MEASURED)
    """Type of the tokens in .npy files."""
    eod_id: int | None = option(None, metavar="ID", needs=(*SETS, *TASKS), group=MEASURED)
    """The id that ends a document (default: the model's, or the tokenizer's)"""

    allow_code_execution: bool = option(False, group=ANSWERS)
    """Run the programs that a model writes, within limits of time and memory; no sandbox: use a container."""
    max_new_tokens: int | None = option(None, metavar="N", parse=count, group=ANSWERS)
    """The most tokens of an answer (default: the task's own)"""

    layout: str = option("", group=RUNTIME)
    """Parallel layout, such as tp=2 or "pp=2,dp=2", on local ranks or torchrun's (default: one rank)"""
    tokenizer: Path | None = option(None, group=RUNTIME)
    """Tokenizer to use instead of the checkpoint's own; with --prepare, the models'."""
    device: Literal["auto", "cuda", "cpu"] = option("auto", group=RUNTIME)
    """Device to run on."""
    dtype: Literal["auto", "fp32", "bf16"] = option("auto", group=RUNTIME)
    """Number format; auto: the saved one, and fp32 on a CPU."""
    batch_tokens: int = option(BATCH_TOKENS, metavar="N", parse=count, group=RUNTIME)
    """About how many tokens a micro batch has."""

    output: Path | None = option(None, metavar="FILE", needs=(*MODELS, "compare"), group=OUTPUT)
    """Write everything as JSON, as each checkpoint is done."""
    compare: tuple[Path, ...] = option((), nargs=2, metavar=("A", "B"), group=OUTPUT)
    """Compare two results of --output: differences with 95% intervals, by paired bootstrap."""

    prepare: Path | None = option(None, metavar="FILE", group=REQUEST_FILE)
    """Write the requests of --tasks, and end."""
    context_length: int | None = option(None, metavar="N", parse=count, needs=("tasks",), group=REQUEST_FILE)
    """The longest request that is prepared, in tokens (default: 2048)"""

    command_line: tuple[str, ...] = ()


EVALUATE = Verb(
    name="evaluate",
    help="Measure checkpoints on perplexity sets and tasks; compare two; write a request file.",
    options=EvaluateOptions,
    run="megatron_fanformer.evaluate.evaluate:evaluate",
    examples=(
        "evaluate runs/demo/run --perplexity held-out=tokens/web",
        "evaluate --prepare paper.requests --tasks paper\n--tokenizer tokenizer.json",
    ),
    removed={
        "--batches": "use --limit-tokens, which does not depend on --batch-tokens",
        "--fewshot": "write the examples into each question's context, or export the model and use lm-eval",
        "--run-code": "use --allow-code-execution, in a container: it is no sandbox",
        "--picture": "--output has the numbers, and a run's TensorBoard those in the loop",
        "--chunking": "sets are cut into chunks; for rolling windows export the model and use lm-eval",
        "--ulogic": "write the rules as questions (docs/evaluation.md)",
        **dict.fromkeys(("--num-samples", "--temperature", "--top-k", "--top-p", "--seed"), GREEDY),
    },
)
