import re
from pathlib import Path

import pytest
from isal import igzip

from megatron_fanformer.data.manifest import read_manifest
from megatron_fanformer.errors import InputError
from megatron_fanformer.prepare.documents import DocumentFile, DocumentParser, parse_block
from megatron_fanformer.prepare.inputs import CHAT_SUFFIXES, expand_inputs
from tests.closed_folders import closed_folder
from tests.data.failing_stores import planned
from tests.prepare.making import Prepare, as_line

pytestmark = pytest.mark.usefixtures("impatient")


def names(found: list[Path], folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in found]


def touch(folder: Path, *files: str) -> None:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_folders_stand_for_their_document_files_sorted(tmp_path: Path) -> None:
    names_of_files = "b/2.jsonl a/1.json.gz b/1.jsonl.zst b/notes.pdf c.json d.parquet e/f.md g.txt.gz"
    touch(tmp_path, *names_of_files.split())
    touch(tmp_path, "b/tokens.ledger.parquet", "b/tokens.manifest.json")
    found = ["a/1.json.gz", "b/1.jsonl.zst", "b/2.jsonl", "d.parquet"]
    assert names(expand_inputs([tmp_path], CHAT_SUFFIXES), tmp_path) == found
    assert names(expand_inputs([tmp_path]), tmp_path) == [*found, "e/f.md", "g.txt.gz"]


def test_the_order_does_not_depend_on_how_files_are_named(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl", "b.jsonl", "c/d.jsonl")
    one = expand_inputs([tmp_path / "c", tmp_path / "b.jsonl", tmp_path / "a.jsonl"])
    assert one == expand_inputs([tmp_path])
    assert expand_inputs([tmp_path, tmp_path / "a.jsonl"]) == one


def test_patterns_take_what_they_match_of_document_files(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jsonl", "a/2.pdf", "b/1.jsonl", "[x].jsonl")
    assert names(expand_inputs([f"{tmp_path}/*/*"]), tmp_path) == ["a/1.jsonl", "b/1.jsonl"]
    assert names(expand_inputs([f"{tmp_path}/**/1.jsonl"]), tmp_path) == ["a/1.jsonl", "b/1.jsonl"]
    assert names(expand_inputs([f"{tmp_path}/[x].jsonl"]), tmp_path) == ["[x].jsonl"]


def test_a_list_names_inputs_a_line(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl", "folder/b.jsonl", "c-1.jsonl")
    listed = tmp_path / "inputs.txt"
    lines = f"{tmp_path}/a.jsonl\n# shards\n\n  {tmp_path}/folder\n{tmp_path}/c-*.jsonl\n"
    for text in (lines, "\ufeff" + lines.replace("\n", "\r\n")):  # as Windows' editors write them
        listed.write_bytes(text.encode())
        for name in (listed, f"file://{listed}"):
            assert names(expand_inputs([f"@{name}"]), tmp_path) == ["a.jsonl", "c-1.jsonl", "folder/b.jsonl"]


@pytest.mark.parametrize("name", ["missing.jsonl", "empty folder", "notes.pdf", "no*match.jsonl", "@missing list"])
def test_an_input_that_cannot_serve_is_an_input_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty folder").mkdir()
    (tmp_path / "notes.pdf").touch()
    path = f"@{tmp_path}/{name[1:]}" if name.startswith("@") else f"{tmp_path}/{name}"
    with pytest.raises(InputError, match=name.lstrip("@").replace("*", r"\*")):
        expand_inputs([path])


def test_a_link_to_no_file_is_not_passed_over(tmp_path: Path) -> None:
    """Unless its name is none that is searched for."""
    touch(tmp_path, "a.jsonl")
    for name in ("notes.pdf", "tokens.manifest.json"):
        (tmp_path / name).symlink_to("gone")
    assert names(expand_inputs([tmp_path]), tmp_path) == ["a.jsonl"]
    (tmp_path / "b.jsonl").symlink_to("gone")
    for given in (tmp_path, tmp_path / "*.jsonl"):
        with pytest.raises(InputError, match=r"b\.jsonl is a link to no file, its documents would be missing"):
            expand_inputs([given])


def test_a_folder_that_cannot_be_read_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "a.jsonl", "closed/b.jsonl", "closed/sub/d.jsonl", "open/b.jsonl", "open/sub/d.jsonl")
    with closed_folder("closed", monkeypatch), pytest.raises(InputError) as refused:
        expand_inputs([tmp_path])
    assert re.search(r"closed cannot be searched \(Permission denied\), its files would be missing", str(refused.value))


def test_a_file_that_links_lead_to_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    touch(tmp_path, "a/1.jsonl", "b/2.jsonl", "other.jsonl", "b/notes.pdf", "b/c.json")
    (tmp_path / "a" / "3.jsonl").symlink_to("1.jsonl")
    (tmp_path / "b" / "4.jsonl").symlink_to("../a/1.jsonl")
    (tmp_path / "a" / "5.jsonl").symlink_to("../other.jsonl")
    (tmp_path / "c").symlink_to("b")
    found = ["a/1.jsonl", "a/5.jsonl", "b/2.jsonl"]
    assert names(expand_inputs([tmp_path / "a", tmp_path / "b"]), tmp_path) == found
    line = f"{tmp_path}/b: 2 files of other kinds passed over, such as {tmp_path}/b/c.json\n"
    assert capsys.readouterr().out == line
    assert names(expand_inputs([f"{tmp_path}/**/[1-4].jsonl"]), tmp_path) == ["a/1.jsonl", "b/2.jsonl"]
    assert names(expand_inputs([tmp_path / "a" / "3.jsonl"]), tmp_path) == ["a/3.jsonl"]


def test_token_files_are_those_of_documents_here(documents: Path, tmp_path: Path, prepare: Prepare) -> None:
    here = prepare(tmp_path / "here", documents)
    there = prepare(tmp_path / "there", f"file://{documents}/", workers=2)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"here{suffix}").read_bytes() == (tmp_path / f"there{suffix}").read_bytes()
    recorded = [(record.path.removeprefix("file://"), record.bytes, record.sha256) for record in there.manifest.inputs]
    assert recorded == [(record.path, record.bytes, record.sha256) for record in here.manifest.inputs]
    again = prepare(tmp_path / "there", f"file://{documents}/")
    assert again.already_there and again.manifest == read_manifest(str(tmp_path / "there"))
    (documents / "a.jsonl.gz").write_bytes(igzip.compress(as_line("another") + b"\n"))
    with pytest.raises(InputError, match="already exists with other inputs"):
        prepare(tmp_path / "there", f"file://{documents}/")


def test_files_are_named_as_those_here_are(documents: Path, tmp_path: Path) -> None:
    with planned(documents) as url:
        (tmp_path / "list").write_text(f"{url}/b.parquet\n{documents}/below/c.jsonl\n")
        for words in (f"@{tmp_path}/list", f"@file://{tmp_path}/list"):
            assert list(map(str, expand_inputs([words]))) == [f"{documents}/below/c.jsonl", f"{url}/b.parquet"]
        assert list(map(str, expand_inputs([f"{url}/*.gz"]))) == [f"{url}/a.jsonl.gz"]
        for words, line in {
            f"{url}/none.jsonl": "names no document file; name one that exists",
            f"{url}/none/": "names no document file",
            f"{url}/own.csv": "names no document file",
            "s3://user:secret@bucket/a.jsonl": "an input is s3://…@bucket/a.jsonl and holds a password",
        }.items():
            with pytest.raises(InputError, match=re.escape(line)):
                expand_inputs([words])
        assert len(expand_inputs([f"{url}/a.jsonl.gz", f"{url}/*.gz"])) == 1


def test_a_file_is_no_pattern_whatever_its_name(documents: Path) -> None:
    for name in ("part[1].jsonl", "part1.jsonl"):
        (documents / name).write_bytes(as_line(name))
    with planned(documents) as url:
        (file,) = expand_inputs([f"{url}/part[1].jsonl"])
        (block,) = DocumentFile(file, DocumentParser().columns).blocks()
        assert [document.text for document in parse_block(block, DocumentParser())] == ["part[1].jsonl"]
        (documents / "part[1].jsonl").unlink()
        assert list(map(str, expand_inputs([f"{url}/part[1].jsonl"]))) == [f"{url}/part1.jsonl"]
