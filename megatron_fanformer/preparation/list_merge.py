"""The end of a preparation by many tasks: proof that they have done all of it alike, and one manifest of the whole."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megatron_fanformer.data.manifest import MANIFEST_SUFFIX, Encoding, Manifest, encode_manifest, sum_by_source
from megatron_fanformer.errors import CorruptError, InputError, escaped
from megatron_fanformer.preparation.list_status import status_of
from megatron_fanformer.preparation.lists import (
    Agreement,
    EmptyList,
    InputLists,
    ListRecord,
    difference_of,
    list_prefix,
    read_lists,
)
from megatron_fanformer.preparation.pipeline import FAILURES_NAMED, blend_of, refuse_outside_blends
from megatron_fanformer.preparation.prepare import PrepareReport
from megatron_fanformer.preparation.remote_outputs import (
    missing_output,
    output_content,
    output_manifest,
    write_output,
)
from megatron_fanformer.preparation.shards import REFUSED_EXAMPLES, is_unchanged
from megatron_fanformer.terminal import show, table


def merge_lists(folder: Path) -> None:
    """Write PREFIX.manifest.json and PREFIX.blend of all lists, and print what they hold; the same again does nothing.

    The manifests of the lists are compared with the lists and with one another; the token files by their sizes alone
    (`inspect PREFIX --verify` reads them).

    Raises:
        CorruptError: a list is not done, or differs; nothing is written.
        InputError: the folder holds no lists, PREFIX is another preparation's, or a blend cannot hold its name.
    """
    lists = read_lists(folder)
    agreement = lists.read_agreement()
    problems: list[str] = []
    manifests: list[Manifest] = []
    if agreement is None:
        problems.append("no list has been begun")
    else:
        problems += _not_done(lists)
        for each in lists.records:
            found, wrong = checked_manifest(agreement, lists, each)
            problems += wrong
            manifests += [found] if found else []
        if not (manifests or problems):
            problems.append("no list holds a document")
        named = Counter(path for manifest in manifests for path in (record.path for record in manifest.inputs))
        problems += [f"{path} is in {count} lists" for path, count in named.items() if count > 1]
    if problems or agreement is None:
        more = f"; and {len(problems) - FAILURES_NAMED} more" if len(problems) > FAILURES_NAMED else ""
        raise CorruptError(
            f"{folder} cannot be merged: {'; '.join(problems[:FAILURES_NAMED])}{more}; "
            "prepare what is not done; of what differs, remove the token files, and prepare it again; merge then"
        )
    merged = _merged(
        manifests, [state.empty for each in lists.records if (state := lists.read_state(each.name)) and state.empty]
    )
    for output in merged.outputs:
        refuse_outside_blends(merged.settings, output.prefix)
    content = {".blend": blend_of(merged.settings, merged.outputs), MANIFEST_SUFFIX: encode_manifest(merged)}
    for suffix, data in content.items():
        if output_content(agreement.output, suffix) not in (None, data):
            raise InputError(
                f"{agreement.output}{suffix} exists, and is not of these lists; remove it, and merge again"
            )
    for suffix, data in content.items():  # the manifest last
        write_output(agreement.output, suffix, data)
    show(_report(agreement.output, merged))


def _not_done(lists: InputLists) -> Iterator[str]:
    for each in status_of(lists):
        if each.stage == "running":
            yield f"list {each.record.name} is not done: a task on {each.host} works on it"
        elif each.stage == "failed":
            yield f"list {each.record.name} has failed: {each.state.error}"
        elif each.stage == "left":
            yield f"list {each.record.name} is not done"


def checked_manifest(agreement: Agreement, lists: InputLists, record: ListRecord) -> tuple[Manifest | None, list[str]]:
    """Return the manifest of a list that is done, and what is wrong with it, in words."""
    prefix, name = list_prefix(agreement.output, record.name), f"list {record.name}"
    problems: list[str] = []
    try:
        manifest = output_manifest(prefix)
        listed = Counter(lists.paths(record.name))
    except (CorruptError, OSError, UnicodeDecodeError) as error:
        return None, [f"{name}: {error}"]
    if not isinstance(manifest, Manifest):
        return None, []  # it is not done, as has been noted, or holds no document
    ours = Agreement(output=agreement.output, settings=manifest.settings, tokenizer=manifest.tokenizer)
    if difference := difference_of(agreement, ours):
        problems.append(f"{name} was prepared with {difference}")
    if listed.total() != record.files:
        problems.append(f"{name} names {listed.total()} files, and not the {record.files} with which it was written")
    read = Counter(each.path for each in manifest.inputs)
    for what, paths in (("lacks", listed - read), ("has, though it is not in the list,", read - listed)):
        if paths:
            others = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            problems.append(f"{prefix} {what} {min(paths)}{others}")
    if changed := [each.path for each in manifest.inputs if os.path.exists(each.path) and not is_unchanged(each)]:
        problems.append(f"{changed[0]} has changed since {name} was prepared")
    if (missing := missing_output(prefix, manifest)) is not None:
        problems.append(f"{missing} is missing, or not of the size that its manifest states")
    return manifest, problems


def _merged(manifests: Sequence[Manifest], empty: Sequence[EmptyList]) -> Manifest:
    first = manifests[0]
    read: list[Manifest | EmptyList] = [*manifests, *empty]
    tools = dict.fromkeys(tool for each in manifests for tool in each.versions)
    return Manifest(
        lines_read=sum(each.lines_read for each in read),
        documents=sum(each.documents for each in manifests),
        tokens=sum(each.tokens for each in manifests),
        text_bytes=sum(each.text_bytes for each in manifests),
        max_token_id=max(each.max_token_id for each in manifests),
        refused=dict(sorted(sum((Counter(each.refused) for each in read), Counter[str]()).items())),
        refused_examples=[example for each in manifests for example in each.refused_examples][:REFUSED_EXAMPLES],
        settings=first.settings,
        tokenizer=first.tokenizer,
        encoding=Encoding(
            backend=_joined(each.encoding.backend for each in manifests),
            reason=_joined(each.encoding.reason for each in manifests if each.encoding.reason) or None,
        ),
        inputs=[record for each in read for record in each.inputs],
        outputs=[output for each in manifests for output in each.outputs],
        versions={tool: _joined(each.versions[tool] for each in manifests if tool in each.versions) for tool in tools},
        by_source=sum_by_source(each.by_source for each in manifests),
    )


def _joined(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values)))


def _report(prefix: str, merged: Manifest) -> Iterator[str]:
    yield from PrepareReport(prefix=prefix, already_there=False, manifest=merged).lines()
    if merged.by_source is None:
        yield "sources: not counted, as there are too many, or an earlier version has prepared a list"
        return
    rows = [
        (escaped(name) or "none", f"{counts.documents:,}", f"{counts.tokens:,}")
        for name, counts in merged.by_source.items()
    ]
    yield from table(("source", "documents", "tokens"), rows, align="lrr")
