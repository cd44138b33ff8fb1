"""Token files described and verified: by prefix, by file, as a blend; and everything that may differ."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_fanformer.data.manifest import (
    FileRecord,
    Manifest,
    TokenFiles,
    encode_manifest,
    manifest_path,
    read_manifest,
)
from megatron_fanformer.durable_files import sha256_of
from tests.data.chat_making import made_up_chats
from tests.inspect.conftest import TOKENIZER, Inspect, Prepared, Said
from tests.inspect.making import write_npy
from tests.prepare.making import prepare_files

# -- described


@pytest.mark.parametrize("ending", ["", ".manifest.json"])
def test_a_pair_by_its_prefix_or_one_of_its_files(inspect: Inspect, pair: Prepared, ending: str) -> None:
    printed = inspect(f"{pair.prefix}{ending}", "--json")
    facts = json.loads(printed.out)
    lengths = [len(document) for document in pair.documents]
    assert (facts["kind"], facts["format"], facts["prefix"]) == ("token files", "megatron", str(pair.prefix))
    assert (facts["documents"], facts["tokens"], facts["dtype"]) == (60, sum(lengths), "uint16")
    assert (facts["shortest"], facts["longest"]) == (min(lengths), max(lengths))
    assert facts["ledger"]["rows"] == 60
    assert facts["manifest"]["tokenizer"]["path"] == str(TOKENIZER)
    text = inspect(pair.prefix).out
    assert f"{pair.prefix}: token files\n" in text and "  bytes      5.94 kB\n" in text and "    rows  60\n" in text
    assert "vocab_size 50,280, " in text


def test_a_folder(inspect: Inspect, pair: Prepared, shard: Prepared) -> None:
    folder = pair.prefix.parent
    facts = json.loads(inspect(folder, "--json").out)
    assert (facts["tokens"], facts["documents"]) == (2 * 2970, 120)
    assert [part["format"] for part in facts["parts"]] == ["megatron", "npy"]
    assert f"  {pair.prefix}: 2,970 tokens\n" in inspect(folder).out
    assert inspect(folder, "--verify").code == 0
    write_npy(folder / "other", pair.documents)  # whose documents nothing tells
    assert json.loads(inspect(folder, "--json").out)["documents"] is None


def test_neither_torch_nor_megatron_is_imported(pair: Prepared) -> None:
    program = (
        "import sys; from megatron_fanformer.cli import main\n"
        f"assert main(['inspect', {str(pair.prefix)!r}, '--verify']) == 0\n"
        "assert not {'torch', 'megatron', 'transformers', 'tokenizers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


# -- verified


def refused(printed: Said, *parts: object) -> None:
    """Exit code 3, one line that names the file, and nothing else."""
    assert (printed.code, printed.out) == (3, "")
    assert len(printed.error.splitlines()) == 1
    for part in parts:
        assert str(part) in printed.error


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def agree_again(prefix: Path, **changes: Any) -> None:
    """Write the manifest anew for the present files, as somebody might who means to deceive."""
    manifest = read_manifest(str(prefix))
    assert isinstance(manifest, Manifest)
    (output,) = manifest.outputs
    files = {
        ending: FileRecord(path=path.name, bytes=path.stat().st_size, sha256=sha256_of(path))
        for ending in output.files
        if (path := Path(f"{prefix}{ending}")).exists()
    }
    of_output, of_whole = (
        {name: value for name, value in changes.items() if name in kind.__struct_fields__}
        for kind in (TokenFiles, Manifest)
    )
    outputs = [msgspec.structs.replace(output, files=files, **of_output)]
    changed = msgspec.structs.replace(manifest, **{"outputs": outputs, **of_whole})
    manifest_path(str(prefix)).write_bytes(encode_manifest(changed))


def test_sound_files(inspect: Inspect, pair: Prepared, shard: Prepared) -> None:
    printed = inspect(pair.prefix, "--verify")
    assert (printed.code, printed.error) == (0, "")
    assert printed.out.splitlines()[-1].startswith("verified: SHA-256 of 3 files, ")
    assert printed.out.endswith("index, ledger and manifest agree on 60 documents and 2,970 tokens\n")
    assert "SHA-256 of 2 files" in json.loads(inspect(shard.prefix, "--verify", "--json").out)["verified"]


@pytest.mark.parametrize("ending", [".bin", ".idx", ".ledger.parquet"])
def test_damaged_files(inspect: Inspect, pair: Prepared, ending: str) -> None:
    path = Path(f"{pair.prefix}{ending}")
    sound = path.read_bytes()
    flip(path, len(sound) // 2)
    refused(inspect(pair.prefix, "--verify"), path, "has SHA-256", "where its manifest says")
    path.write_bytes(sound[:-1])
    refused(inspect(pair.prefix, "--verify"), path, f"holds {len(sound) - 1} bytes where its manifest says")
    path.unlink()
    refused(inspect(pair.prefix, "--verify"), path, "cannot be read (No such file or directory)")


def test_a_manifest_that_is_damaged_or_missing(inspect: Inspect, pair: Prepared) -> None:
    path = manifest_path(str(pair.prefix))
    path.write_bytes(path.read_bytes()[:-10])
    refused(inspect(pair.prefix, "--verify"), path, "is not a manifest")
    path.unlink()
    printed = inspect(pair.prefix, "--verify")
    assert (printed.code, printed.out) == (2, "")
    assert printed.error == (f"{path} does not exist, and without it there is nothing to verify {pair.prefix} against")


@pytest.mark.parametrize(
    ("changes", "printed"),
    [
        ({"documents": 61}, "documents and those of its index differ (61 and 60)"),
        ({"tokens": 5}, "tokens and those of its index differ (5 and 2970)"),
    ],
)
def test_counts_that_differ(inspect: Inspect, pair: Prepared, changes: dict[str, Any], printed: str) -> None:
    agree_again(pair.prefix, **changes)
    refused(inspect(pair.prefix, "--verify"), f"{pair.prefix}.manifest.json", printed)


# -- conversations

CHATS = 30


@pytest.fixture(scope="module")
def prepared_chats(tmp_path_factory: pytest.TempPathFactory, small_tokenizer_file: Path) -> Path:
    """A folder with the prefixes `pair` and `rows`, of thirty lines and one that is refused."""
    folder = tmp_path_factory.mktemp("chats")
    lines = [*(json.dumps({"messages": messages}) for messages in made_up_chats(CHATS)), "{"]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    for name, form in (("pair", "megatron"), ("rows", "npy")):
        chat = {"chat": True, "chat_template": "olmo", "max_tokens": 400}
        prepare_files(str(folder / name), [folder / "chats.jsonl"], small_tokenizer_file, format=form, **chat)
    return folder


@pytest.mark.parametrize(("name", "kind"), [("pair.mask.bin", "chats"), ("rows/", "chat rows")])
def test_what_chats_hold(inspect: Inspect, prepared_chats: Path, name: str, kind: str) -> None:
    facts = json.loads(inspect(f"{prepared_chats}/{name}", "--json").out)
    mask = np.fromfile(prepared_chats / ("pair.mask.bin" if kind == "chats" else "rows/label_mask.npy"), np.uint8)
    assert (facts["kind"], facts["format"], facts["documents"]) == ("token files", kind, CHATS)
    assert (facts["tokens"], facts["learned_tokens"]) == (len(mask), mask.sum())
    assert facts["ledger"]["rows"] == CHATS + 1
    assert "agree on 30 documents" in inspect(f"{prepared_chats}/{name}", "--verify").out


def test_a_folder_of_olmos_script_has_no_manifest(inspect: Inspect, tmp_path: Path) -> None:
    np.arange(4096, dtype="<u2").tofile(tmp_path / "input_ids.npy")
    np.tile(np.arange(2048) % 512 == 9, 2).tofile(tmp_path / "label_mask.npy")
    facts = json.loads(inspect(tmp_path, "--json").out)
    assert (facts["documents"], facts["longest"]) == (2, 1536 + 10)


def test_damage_of_chats_is_named(inspect: Inspect, prepared_chats: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(prepared_chats, tmp_path / "chats")
    flip(copied / "rows/label_mask.npy", 3)
    refused(inspect(copied / "rows", "--verify"), "label_mask.npy has SHA-256 ")
    agree_again(copied / "pair", documents=7)
    refused(inspect(copied / "pair", "--verify"), "documents and those of its index")
