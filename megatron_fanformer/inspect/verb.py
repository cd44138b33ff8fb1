"""The verb `inspect`: describe a path, verify it, draw the metrics of a run, or show the samples of a step.

Nothing slow is imported before it is needed: data are described without torch.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fanformer.errors import escaped
from megatron_fanformer.options import Verb, argument, option, overrides, path_or_none
from megatron_fanformer.runtime import device
from megatron_fanformer.stores import is_url
from megatron_fanformer.terminal import labelled, show, size, some

if TYPE_CHECKING:
    pass

REMOVED = {
    "--trace": "a run's profiles are in its folder, traces/step-…/rank-….txt",
    "--follow": "use tail -f RUN/metrics.jsonl",
    "--hang": "what ranks did when a run hung is on its last line, and in the log files of logging.folder",
}
"""Remedies for options of earlier versions."""


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Options of `inspect`."""

    path: str = argument(metavar="PATH")
    """Token files (a prefix, one of them, a blend file, a folder), a run or a checkpoint, or an exported folder; the
    URL of a prefix, a token file, a run or a checkpoint; with --step and --index a configuration file."""
    verify: bool = option(False, exclusive="action")
    """Check that all of it is present and undamaged."""
    json: bool = False
    """Print one JSON object."""
    index: bool = option(False, exclusive="action")
    """Make the sample indices and the order of the first epoch that a run of the configuration file PATH needs."""
    picture: Path | None = option(None, metavar="FILE", parse=path_or_none, exclusive="action")
    """Draw the training and validation losses of the run PATH into this PNG."""
    phases: Path | None = option(None, metavar="FILE", parse=path_or_none, exclusive="action")
    """Draw the phase health that a run has logged into this PNG."""
    step: int | None = option(None, exclusive="action")
    """Show the samples of this training step, of a run or of --config."""
    config: Path | None = option(None, metavar="FILE", parse=path_or_none, needs=("step",))
    """With --step: the configuration that trains on PATH."""
    full: bool = option(False, needs=("step",))
    """With --step: show whole texts."""
    overrides: tuple[str, ...] = overrides(needs=("index", "step"))


def inspect(options: InspectOptions) -> None:
    """Run `inspect`."""
    if options.picture is not None or options.phases is not None:
        from megatron_fanformer.inspect.checkpoint import draw_metrics

        show([draw_metrics(options.path, losses=options.picture, phases=options.phases)])
        return
    if options.step is None and not options.index:
        report = inspect_path(options.path, verify=options.verify)
        _show(report, list(report_lines(report)), as_json=options.json)
        return
    device.hide_gpus()
    device.prepare_libraries()
    from megatron_fanformer.runtime import megatron_cpu

    megatron_cpu.install()
    from megatron_fanformer.inspect.step import index_data, inspect_step, step_lines

    if options.step is None:
        show([index_data(options.path, options.overrides)])
    else:
        report = inspect_step(options.path, options.step, options.config, options.overrides, full=options.full)
        _show(report, list(step_lines(report)), as_json=options.json)


def _show(report: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
    show([json.dumps(report, indent=2, ensure_ascii=False)] if as_json else lines)


def inspect_path(path: str, *, verify: bool = False) -> dict[str, Any]:
    """Describe a dataset, a run, a checkpoint or an export; with `verify`, check it first and add `verified`.

    The report is the object of `--json`: `path`, `kind` and facts; a run's newest checkpoint, or a blend's files, are
    in `parts`.

    Raises:
        InputError: it is none of these, there is nothing to verify it against, or its run has removed it meanwhile.
        CorruptError: it cannot be read, or fails its verification.
    """
    from megatron_fanformer.checkpoint.remote import on_this_machine
    from megatron_fanformer.convert.recognition import OURS, Target, checkpoint_of, recognise
    from megatron_fanformer.data.manifest import read_manifest

    if is_url(path) and (
        path.endswith((".npy", ".bin", ".idx")) or ("::" not in path and read_manifest(path) is not None)
    ):
        target = Target("token files", Path(path), (re.sub(r"\.(npy|bin|idx)$", "", path),))
    else:
        target = recognise(on_this_machine(path))
    if target.is_data:
        from megatron_fanformer.inspect.dataset import check_data, describe_data

        verified = {"verified": check_data(target)} if verify else {}
        return {**describe_data(target), **verified}
    from megatron_fanformer.inspect import checkpoint

    if target.kind not in OURS:
        is_megatron_lm = target.kind == "megatron-lm"
        check = checkpoint.check_megatron_lm if is_megatron_lm else checkpoint.check_export
        describe = checkpoint.describe_megatron_lm if is_megatron_lm else checkpoint.describe_export
        verified = {"verified": check(target)} if verify else {}
        return {**describe(target), **verified}
    # Looked up once: a run that goes on has others later. One that has none yet can be described.
    newest = checkpoint_of(target) if verify or target.kind == "checkpoint" else target.path
    verified = {"verified": checkpoint.check_checkpoint(newest)} if verify else {}
    is_run = target.kind == "run"
    facts = checkpoint.describe_run(target.path) if is_run else checkpoint.describe_checkpoint(target.path)
    return {**facts, **verified}


# -- a report as text

SHOWN_ROWS = 20  # of one group
NAMES = ("path", "prefix", "kind")  # keys that name one of several facts; the first stands for it in a list
SHOWN_CHARACTERS = 200  # of one value, such as a chat template


def report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a report as text: its facts, then its groups of facts."""
    facts = dict(report)
    yield escaped(f"{facts.pop('path')}: {facts.pop('kind')}")
    verified = facts.pop("verified", None)
    part = facts.pop("parts")[0] if len(facts.get("parts", ())) == 1 else None
    groups = {name: _rows(value) for name, value in facts.items() if _rows(value)}
    plain = {name: value for name, value in facts.items() if name not in groups}
    rows = [(name, size(value) if name == "bytes" else _brief(value)) for name, value in plain.items()]
    yield from _labelled(rows)
    for name, rows in groups.items():
        yield f"  {name.replace('_', ' ')}"
        more = [("", f"and {len(rows) - SHOWN_ROWS:,} more; --json has all")] if len(rows) > SHOWN_ROWS else []
        yield from (f"  {line}" for line in _labelled([*rows[:SHOWN_ROWS], *more]))
    if part is not None:
        yield ""
        yield from report_lines(part)
    if verified is not None:
        yield f"verified: {verified}"


def _rows(value: Any) -> list[tuple[str, str]]:
    """Return the rows of a group of facts, named by their keys or paths; none if the value is no group."""
    if isinstance(value, Mapping):
        return [(name, _brief(item)) for name, item in value.items() if item is not None]
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return [
            (item.get("path", ""), _brief({**item, **dict.fromkeys([*NAMES, "ledger", "manifest"])})) for item in value
        ]
    return []


def _labelled(rows: list[tuple[str, str]]) -> list[str]:
    return labelled([(name.replace("_", " "), escaped(text)) for name, text in rows])


def _brief(value: Any) -> str:
    """Return a value on one line."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        items = [
            f"{key} ({_brief(item)})" if isinstance(item, Mapping | list) else f"{key} {_brief(item)}"
            for key, item in value.items()
            if item is not None
        ]
        return (some(items) if any(isinstance(key, int) for key in value) else ", ".join(items)) or "none"
    if isinstance(value, list):
        names = (
            next((item[name] for name in NAMES if name in item), item) if isinstance(item, Mapping) else item
            for item in value
        )
        return some(map(_brief, names)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    text = " ".join(str(value).split())
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
