"""Token files on other stores: those of the same preparation here, whole or without a manifest, whatever fails."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from megatron_fanformer import stores
from megatron_fanformer.cli import main
from megatron_fanformer.data import remote_files
from megatron_fanformer.data.blends import parse_blend
from megatron_fanformer.data.manifest import Manifest, read_any_manifest
from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.preparation import remote_outputs
from megatron_fanformer.preparation.list_merge import merge_lists
from megatron_fanformer.preparation.list_tasks import prepare_lists
from megatron_fanformer.preparation.lists import write_lists
from megatron_fanformer.preparation.remote_outputs import RemoteOutput
from megatron_fanformer.preparation.verb import PrepareConfig
from tests.checkpoint.stores import FailingFiles
from tests.data.chat_making import made_up_chats
from tests.data.failing_stores import FORBIDDEN, Plan, planned
from tests.preparation.making import Prepare, as_line
from tests.preparation.test_interrupted import hashes


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is remembered of stores, and no pause is waited for."""
    monkeypatch.setattr(stores.time, "sleep", lambda _: None)
    remote_files.forget()
    yield
    remote_files.forget()


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    (folder := tmp_path / "documents").mkdir()
    for number in range(3):
        lines = [as_line(f"file {number} document {n} " * 9) for n in range(40)]
        (folder / f"{number}.jsonl").write_bytes(b"\n".join(lines))
    return folder


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    (folder := tmp_path / "chats").mkdir()
    lines = [json.dumps({"messages": messages}) for messages in made_up_chats(40)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return folder


SETTINGS: dict[str, dict[str, Any]] = {
    "parts": {"part_bytes": 3000},
    "rows of chats": {"chat": True, "chat_template": "olmo", "format": "npy"},
}


@pytest.mark.parametrize("kind", list(SETTINGS))
def test_token_files_there_are_those_here(
    tmp_path: Path, documents: Path, chats: Path, prepare: Prepare, kind: str
) -> None:
    """Of inputs at a URL, too."""
    (there := tmp_path / "there").mkdir()
    options = {**SETTINGS[kind], "scratch": tmp_path / "scratch"}
    url = f"file://{there}/tokens/web"
    inputs = f"file://{chats if kind == 'rows of chats' else documents}"
    prepare(tmp_path / "here" / "web", f"{inputs}/", **SETTINGS[kind])
    first = prepare(url, f"{inputs}/", **options)
    (left := RemoteOutput(url).place(tmp_path / "scratch")).mkdir()  # by a process that was killed after its last step
    (left / "web.bin").touch()
    again = prepare(url, f"{inputs}/", **options)
    assert hashes(there / "tokens") == hashes(tmp_path / "here")
    assert (first.already_there, again.already_there, first.prefix) == (False, True, url)
    assert first.manifest == again.manifest == read_any_manifest(str(tmp_path / "here" / "web"))
    assert list((tmp_path / "scratch").iterdir()) == []
    with pytest.raises(InputError, match=r"output prefix file://.*web already exists with (max_tokens|min_length)"):
        other = {"min_length": 3} if kind == "parts" else {"max_tokens": 99}
        prepare(url, f"{inputs}/", **{**options, **other})
    next((there / "tokens").rglob("*.npy" if kind == "rows of chats" else "*.bin")).unlink()
    with pytest.raises(InputError, match=r"web.manifest.json exists, but not all files that it lists"):
        prepare(url, f"{inputs}/", **options)


@pytest.mark.parametrize("kind", ["refused", pytest.param("cut off", marks=pytest.mark.full), "changed"])
def test_whatever_call_fails_nothing_looks_whole_that_is_not(
    tmp_path: Path,
    documents: Path,
    prepare: Prepare,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each call of a copy that is not attempted again, and goes on when it is started again."""
    fsspec.register_implementation("failing", FailingFiles, clobber=True)
    monkeypatch.setattr(FailingFiles, "target", 0)
    for module in (stores, remote_outputs):
        monkeypatch.setattr(module, "PAUSES_SECONDS", ())
    here, there = tmp_path / "here", tmp_path / "there"
    manifest = prepare(here / "web", documents).manifest
    output = RemoteOutput(f"failing://{there}/web")
    monkeypatch.setattr(FailingFiles, "kind", kind)
    failed, target = 0, 0
    while failed == target:
        target += 1
        shutil.rmtree(there, ignore_errors=True)
        there.mkdir()
        FailingFiles.target, FailingFiles.count = target, 0
        try:
            output.upload(str(here / "web"), manifest)
        except FanformerError:
            failed += 1
        if (there / "web.manifest.json").exists():
            assert hashes(there).items() >= hashes(here).items()
        FailingFiles.target = 0
        output.upload(str(here / "web"), manifest)
        assert hashes(there) == hashes(here)
    assert failed > 20


def test_what_was_copied_is_not_copied_again(
    tmp_path: Path, documents: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    manifest = prepare(here / "web", documents).manifest
    there.mkdir()
    sent: list[str] = []
    send_file = remote_outputs.send_file

    def send(files: Any, file: Path, path: str) -> None:
        if file.suffix == ".idx" and len(sent) < 3:
            raise KeyboardInterrupt
        sent.append(file.name)
        send_file(files, file, path)

    monkeypatch.setattr(remote_outputs, "send_file", send)
    output = RemoteOutput(f"file://{there}/web")
    with pytest.raises(KeyboardInterrupt):
        output.upload(str(here / "web"), manifest)
    (there / "web.bin").write_bytes(b"")
    assert sent == ["web.bin", "web.ledger.parquet"]
    sent.append("then")
    output.upload(str(here / "web"), manifest)
    assert sent[3:] == ["web.bin", "web.idx"]
    assert hashes(there) == hashes(here)


def test_another_preparations_files_are_not_overwritten_by_the_first_part(
    tmp_path: Path, documents: Path, prepare: Prepare
) -> None:
    (there := tmp_path / "there").mkdir()
    prepare(f"file://{there}/web-00000", documents / "0.jsonl", scratch=tmp_path / "scratch")
    before = hashes(there)
    with pytest.raises(InputError, match=r"web-00000\.bin exists, and there is no manifest of a complete preparation"):
        prepare(f"file://{there}/web", documents, part_bytes=3000, scratch=tmp_path / "scratch")
    assert hashes(there) == before


def test_lists_are_prepared_to_a_store_and_merged_there(
    tmp_path: Path, documents: Path, small_tokenizer_file: Path
) -> None:
    lists, there = tmp_path / "lists", tmp_path / "there"
    there.mkdir()
    write_lists(sorted(documents.iterdir()), 2, lists)
    options = {"tokenizer": str(small_tokenizer_file), "workers": 1, "scratch": tmp_path / "scratch"}
    for _ in range(2):  # the second task finds all done
        prepare_lists(PrepareConfig(from_lists=lists, output=f"file://{there}/web", **options))
    merge_lists(lists)
    merge_lists(lists)
    merged = read_any_manifest(f"file://{there}/web")
    assert isinstance(merged, Manifest) and merged.documents == 120
    sources = parse_blend([f"@{there}/web.blend"]).sources
    assert [source.paths for source in sources] == [(f"{there}/web-000",), (f"{there}/web-001",)]
    (there / "web.blend").write_text("another")
    with pytest.raises(InputError, match=r"web\.blend exists, and is not of these lists"):
        merge_lists(lists)


def test_outputs_that_cannot_be_written_are_one_line(
    tmp_path: Path, documents: Path, small_tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "foreign.idx").touch()
    (tmp_path / "blocked").touch()
    with planned(documents, Plan(1.0, kinds=(FORBIDDEN,))) as forbidden:
        for output, line in {
            "https://host/tokens/web": "cannot be written: https is only read; name s3://…, gs://… or a path",
            "memory://web": "it must be the URL of a prefix, such as s3://bucket/tokens/web, or file:///disk/run",
            "s3://user:secret@bucket/web": "output is s3://…@bucket/web and holds a password",
            "file:///folder/": "names no prefix; name one in a bucket",
            f"file://{tmp_path}/folder/.": "names no prefix; name one in a bucket",
            f"file://{tmp_path}/foreign": "foreign.idx exists, and there is no manifest of a complete preparation",
            f"{forbidden}/web": "web cannot be used (PermissionError: the token has expired); check its name",
        }.items():
            words = ["prepare", str(documents), "--output", output, "--tokenizer", str(small_tokenizer_file)]
            assert main([*words, "--scratch", str(tmp_path / "scratch")]) == 2
            (error,) = capsys.readouterr().err.splitlines()
            assert line in error and "secret" not in error
    assert not any((tmp_path / "scratch").rglob("*"))
    for words, line in {
        ("--scratch", "x", "--output", "y"): "scratch is set, which has no effect without --output at a URL",
        ("--lists", "2", "--output", "s3://bucket/lists"): "is on another store, and lists are files of a disk",
    }.items():
        assert main(["prepare", str(documents), *words]) == 2
        assert line in capsys.readouterr().err
