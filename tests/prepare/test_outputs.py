"""Documents and token files on other stores: the bytes of the same preparation here, whole or without a manifest."""

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest

from megatron_fanformer import stores
from megatron_fanformer.cli import main
from megatron_fanformer.data.manifest import read_any_manifest
from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.prepare import outputs
from megatron_fanformer.prepare.outputs import upload
from tests.checkpoint.stores import FailingFiles
from tests.data.chat_making import made_up_chats
from tests.data.failing_stores import FORBIDDEN, Plan, planned
from tests.disk_steps import recorded_steps
from tests.prepare.making import Prepare, hashes

pytestmark = pytest.mark.usefixtures("impatient")


SETTINGS: dict[str, dict[str, Any]] = {
    "documents": {},
    "rows of chats": {"chat": True, "chat_template": "olmo", "format": "npy"},
}


@pytest.mark.parametrize("kind", list(SETTINGS))
def test_token_files_there_are_those_here(tmp_path: Path, documents: Path, prepare: Prepare, kind: str) -> None:
    (there := tmp_path / "there").mkdir()
    options = {**SETTINGS[kind], "scratch": tmp_path / "scratch"}
    url = f"file://{there}/tokens/web"
    if kind == "rows of chats":
        shutil.rmtree(documents)
        documents.mkdir()
        lines = [json.dumps({"messages": messages}) for messages in made_up_chats(40)]
        (documents / "a.jsonl").write_text("\n".join(lines))
    prepare(tmp_path / "here" / "web", f"file://{documents}/", **SETTINGS[kind])
    first = prepare(url, f"file://{documents}/", **options)
    again = prepare(url, f"file://{documents}/", **options)
    assert hashes(there / "tokens") == hashes(tmp_path / "here")
    assert (first.already_there, again.already_there, first.prefix) == (False, True, url)
    assert first.manifest == again.manifest == read_any_manifest(str(tmp_path / "here" / "web"))
    assert list((tmp_path / "scratch").iterdir()) == []
    with pytest.raises(InputError, match=r"output prefix file://.*web already exists with (max_tokens|min_length)"):
        other = {"min_length": 3} if kind == "documents" else {"max_tokens": 99}
        prepare(url, f"file://{documents}/", **{**options, **other})
    next((there / "tokens").rglob("*.npy" if kind == "rows of chats" else "*.bin")).unlink()
    with pytest.raises(InputError, match=r"web.manifest.json exists, but not all files that it lists"):
        prepare(url, f"file://{documents}/", **options)


@pytest.mark.parametrize("kind", ["refused", "cut off"])
def test_whatever_call_fails_nothing_looks_whole_that_is_not(
    tmp_path: Path, documents: Path, prepare: Prepare, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call of a copy that is not attempted again, and goes on when it is started again."""
    fsspec.register_implementation("failing", FailingFiles, clobber=True)
    monkeypatch.setattr(FailingFiles, "target", 0)
    monkeypatch.setattr(FailingFiles, "count", 0)
    monkeypatch.setattr(stores, "PAUSES_SECONDS", ())
    here, there = tmp_path / "here", tmp_path / "there"
    manifest = prepare(here / "web", documents).manifest
    monkeypatch.setattr(FailingFiles, "kind", kind)
    failed, target = 0, 0
    while FailingFiles.count >= target:
        target += 1
        shutil.rmtree(there, ignore_errors=True)
        there.mkdir()
        FailingFiles.target, FailingFiles.count = target, 0
        try:
            upload(str(here / "web"), f"failing://{there}/web", manifest)
        except FanformerError:
            failed += 1
        if (there / "web.manifest.json").exists():
            assert {**hashes(there), "web.manifest.json": ""} == {**hashes(here), "web.manifest.json": ""}
        calls, FailingFiles.target = FailingFiles.count, 0
        upload(str(here / "web"), f"failing://{there}/web", manifest)
        assert hashes(there) == hashes(here)
        FailingFiles.count = calls
    assert failed > 8


def test_a_copy_that_was_cut_off_goes_on(
    tmp_path: Path, documents: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, options = f"file://{tmp_path}/there/web", {"scratch": tmp_path / "scratch"}
    (tmp_path / "there").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("megatron_fanformer.prepare.prepare.upload", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(url, documents, **options)
    shutil.copy(next((tmp_path / "scratch").glob("*/web.bin")), tmp_path / "there")
    prepare(url, documents, **options)
    prepare(tmp_path / "here" / "web", documents)
    assert hashes(tmp_path / "there") == hashes(tmp_path / "here")
    assert list((tmp_path / "scratch").iterdir()) == []


def test_outputs_that_cannot_be_written_are_one_line(
    tmp_path: Path, documents: Path, small_tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "foreign.idx").touch()
    with planned(documents, Plan(1.0, kinds=(FORBIDDEN,))) as forbidden:
        for output, line in {
            "https://host/tokens/web": "cannot be written: https is only read; name s3://…, gs://… or a path",
            "memory://web": "it must be the URL of a prefix, such as s3://bucket/tokens/web, or file:///disk/run",
            "s3://user:secret@bucket/web": "output is s3://…@bucket/web and holds a password",
            "file:///folder/": "names no prefix; name one in a bucket",
            f"file://{tmp_path}/foreign": "foreign.idx exists, and there is no manifest of a complete",
            f"{forbidden}/web": "web cannot be used (PermissionError: the token has expired); check its name",
        }.items():
            words = ["prepare", str(documents), "--output", output, "--tokenizer", str(small_tokenizer_file)]
            assert main([*words, "--scratch", str(tmp_path / "scratch")]) == 2
            (error,) = capsys.readouterr().err.splitlines()
            assert line in error and "secret" not in error
    assert not any((tmp_path / "scratch").rglob("*"))
    words = ["--scratch", "x", "--output", "y", "--tokenizer", "z"]
    assert main(["prepare", str(documents), *words]) == 2
    assert "scratch is set, which has no effect without --output at a URL" in capsys.readouterr().err


def test_an_index_of_many_documents_is_written_in_chunks(
    tmp_path: Path, mixed: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path / "whole", mixed)
    monkeypatch.setattr(outputs, "INDEX_CHUNK", 1)  # three documents make three
    prepare(tmp_path / "chunks", mixed)
    assert (tmp_path / "chunks.idx").read_bytes() == (tmp_path / "whole.idx").read_bytes()


def test_token_files_get_their_names_once_they_are_on_the_disk(
    tmp_path: Path, mixed: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = recorded_steps(monkeypatch)
    prepare(tmp_path / "out", mixed)
    names = ("out.bin", "out.idx", "out.ledger.parquet")
    for name in names:
        renamed = steps.index(("rename", name))
        assert ("fsync", name) in steps[:renamed] and ("fsync", tmp_path.name) in steps[renamed:]
    manifest = steps.index(("rename", "out.manifest.json"))
    assert all(steps.index(("rename", name)) < manifest for name in names)
    assert ("fsync", tmp_path.name) == steps[manifest + 1]
