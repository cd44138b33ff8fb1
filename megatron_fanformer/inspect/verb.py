"""The verb `inspect`: describe a path, verify it, or show the samples of a step.

torch is imported only where it is needed: describing token files needs none.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fanformer.errors import escaped
from megatron_fanformer.options import Verb, argument, option
from megatron_fanformer.runtime import device
from megatron_fanformer.stores import is_url
from megatron_fanformer.terminal import show, size, some, table

SHOWN_CHARACTERS = 200  # of one value, such as a chat template
TENSORBOARD = "TensorBoard draws it: set logging.tensorboard, and tensorboard --logdir RUN"
REMOVED = {
    "--trace": "a run's profiles are in its folder, traces/step-…/rank-….txt",
    "--follow": "use tail -f RUN/metrics.jsonl",
    "--hang": "what ranks did when a run hung is on its last line, and in the log files of logging.folder",
    "--picture": TENSORBOARD,
    "--phases": TENSORBOARD,
    "--index": "train makes the indices when it starts",
    "--config": "name the configuration file as PATH",
    "--full": "--json has whole texts and all ids",
}
"""What to do instead of using an option of an earlier version."""


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Options of `inspect`."""

    path: str = argument(metavar="PATH")
    """Token files (a prefix, one of them, a folder), a run or a checkpoint, or an exported folder; the URL of a prefix,
    a token file, a run or a checkpoint; with --step a run, a checkpoint or a configuration file."""
    verify: bool = option(False, exclusive="action")
    """Check that all of it is present and undamaged."""
    json: bool = False
    """Print one JSON object."""
    step: int | None = option(None, exclusive="action")
    """Show the samples of this training step, and their documents."""
    overrides: tuple[str, ...] = option((), needs=("step",))


def inspect(options: InspectOptions) -> None:
    """Describe or verify a path, or show the samples of a step, and print the report as text or JSON."""
    if options.step is None:
        report = inspect_path(options.path, verify=options.verify)
        lines = report_lines(report)
    else:
        device.hide_gpus()  # reading samples needs none
        device.prepare_libraries()
        from megatron_fanformer.runtime import megatron_cpu

        megatron_cpu.install()
        from megatron_fanformer.inspect.step import inspect_step, step_lines

        report = inspect_step(options.path, options.step, options.overrides)
        lines = step_lines(report)
    show([json.dumps(report, indent=2, ensure_ascii=False, default=str)] if options.json else list(lines))


def inspect_path(path: str, *, verify: bool = False) -> dict[str, Any]:
    """Describe token files, a run, a checkpoint or an export; with `verify`, check them first and add `verified`.

    The report is the object that `--json` prints: `path`, `kind` and facts. In `parts` are the reports of a run's
    newest checkpoint, or of a folder's token files.

    Raises:
        InputError: the path is none of these, there is nothing to verify it against, or its run has just removed it.
        CorruptError: a file cannot be read, or fails its verification.
    """
    from megatron_fanformer.checkpoint.remote import on_this_machine
    from megatron_fanformer.convert.recognition import KINDS, OURS, Target, checkpoint_of, recognize
    from megatron_fanformer.data.manifest import read_manifest

    is_token_file = path.endswith((".npy", ".bin", ".idx"))
    # Behind a chain of URLs (a::b) no manifest is looked for: data is not read through chains.
    if is_url(path) and (is_token_file or ("::" not in path and read_manifest(path) is not None)):
        target = Target("token files", Path(path), (re.sub(r"\.(npy|bin|idx)$", "", path),))
    else:
        kinds = [kind for kind in KINDS if kind != "megatron-lm"]  # which `convert` alone reads
        target = recognize(on_this_machine(path), kinds)
    if target.is_data:
        from megatron_fanformer.inspect.dataset import check_data, describe_data

        verified = {"verified": check_data(target)} if verify else {}
        return {**describe_data(target), **verified}
    from megatron_fanformer.inspect import checkpoint

    if target.kind not in OURS:
        verified = {"verified": checkpoint.check_export(target)} if verify else {}
        return {**checkpoint.describe_export(target), **verified}
    # A run without a checkpoint, which `checkpoint_of` refuses, can be described, but not verified.
    verified = {"verified": checkpoint.check_checkpoint(checkpoint_of(target))} if verify else {}
    describe = checkpoint.describe_run if target.kind == "run" else checkpoint.describe_checkpoint
    return {**describe(target.path), **verified}


# -- a report as text


def report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a report: its facts, its groups of facts, and its parts."""
    yield escaped(f"{report['path']}: {report['kind']}")
    parts = report.get("parts", ())
    facts = {name: report[name] for name in report if name not in ("path", "kind", "parts", "verified")}
    groups = {name: facts.pop(name) for name in [*facts] if isinstance(facts[name], Mapping)}
    yield from _fact_lines(facts)
    for name, group in groups.items():
        yield f"  {name}"
        yield from (f"  {line}" for line in _fact_lines(group))
    if len(parts) == 1:  # a run's newest checkpoint, or a folder's only token files
        yield ""
        yield from report_lines(parts[0])
    else:  # token files; none if the report has no parts
        yield from (escaped(f"  {part['path']}: {part['tokens']:,} tokens") for part in parts)
    if "verified" in report:
        yield f"verified: {report['verified']}"


def _fact_lines(facts: Mapping[str, Any]) -> list[str]:
    texts = {name: size(value) if name == "bytes" else _brief(value) for name, value in facts.items()}
    rows = [("", escaped(name), escaped(text)) for name, text in texts.items()]
    return table(("", "", ""), rows, align="lll")[1:]  # without the row of titles


def _brief(value: Any) -> str:
    """Return a value as a short text on one line: of a list some items or, if they are mappings, their number."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_brief(item)}" for key, item in value.items() if item is not None) or "none"
    if isinstance(value, list | tuple):
        return str(len(value)) if value and isinstance(value[0], Mapping) else (some(map(_brief, value)) or "none")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    text = "none" if value is None else " ".join(str(value).split())
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} …"


INSPECT = Verb(
    name="inspect",
    help="Describe or verify data, a run, a checkpoint or an export; show the samples of a step.",
    options=InspectOptions,
    run="megatron_fanformer.inspect.verb:inspect",
    examples=("inspect runs/demo/tokens/train --verify", "inspect runs/demo/run --step 200"),
    notes="With --step, fields of the configuration can be set as --section.field VALUE, after PATH.",
    removed=REMOVED,
)
