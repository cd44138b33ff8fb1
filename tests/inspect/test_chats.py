"""Files of chats described and verified, in both forms."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.data.chat_making import made_up_chats
from tests.inspect.conftest import Inspect
from tests.inspect.test_dataset import agree_again, flip, refused
from tests.prepare.making import prepare_files

CHATS = 30


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, small_tokenizer_file: Path) -> Path:
    """A folder with the prefixes `pair` and `rows`, of thirty lines and one that is refused."""
    folder = tmp_path_factory.mktemp("chats")
    lines = [*(json.dumps({"messages": messages}) for messages in made_up_chats(CHATS)), "{"]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    for name, form in (("pair", "megatron"), ("rows", "npy")):
        chat = {"chat": True, "chat_template": "olmo", "max_tokens": 400}
        prepare_files(str(folder / name), [folder / "chats.jsonl"], small_tokenizer_file, format=form, **chat)
    return folder


@pytest.fixture
def copied(prepared: Path, tmp_path: Path) -> Path:
    """The same files, which a test may change."""
    return Path(shutil.copytree(prepared, tmp_path, dirs_exist_ok=True))


@pytest.mark.parametrize(("name", "kind"), [("pair.mask.bin", "chats"), ("rows/", "chat rows")])
def test_what_chats_hold(inspect: Inspect, prepared: Path, name: str, kind: str) -> None:
    facts = json.loads(inspect(f"{prepared}/{name}", "--json").out)
    mask = np.fromfile(prepared / ("pair.mask.bin" if kind == "chats" else "rows/label_mask.npy"), np.uint8)
    assert (facts["kind"], facts["format"], facts["documents"]) == ("token files", kind, CHATS)
    assert (facts["tokens"], facts["learned_tokens"]) == (len(mask), mask.sum())
    assert facts["ledger"]["rows"] == CHATS + 1


def test_a_folder_of_olmos_script_has_no_manifest(inspect: Inspect, tmp_path: Path) -> None:
    np.arange(4096, dtype="<u2").tofile(tmp_path / "input_ids.npy")
    np.tile(np.arange(2048) % 512 == 9, 2).tofile(tmp_path / "label_mask.npy")
    facts = json.loads(inspect(tmp_path, "--json").out)
    assert (facts["documents"], facts["longest"], facts["learned_tokens"]) == (2, 1536 + 10, 8)


@pytest.mark.parametrize("name", ["pair", "rows"])
def test_chats_are_intact(inspect: Inspect, prepared: Path, name: str) -> None:
    output = inspect(prepared / name, "--verify")
    assert output.code == 0 and "agree on 30 documents" in output.out


@pytest.mark.parametrize(
    ("name", "damage", "output"),
    [
        ("rows", lambda folder: flip(folder / "rows/label_mask.npy", 3), "label_mask.npy has SHA-256 "),
        ("pair", lambda folder: agree_again(folder / "pair", documents=7), "documents and those of its index"),
    ],
)
def test_damage_is_named(
    inspect: Inspect, copied: Path, name: str, damage: Callable[[Path], object], output: str
) -> None:
    damage(copied)
    refused(inspect(copied / name, "--verify"), output)
