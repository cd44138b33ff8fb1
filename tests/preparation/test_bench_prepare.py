import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_prepare.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_prepare", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_prepare"] = module  # its worker processes look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of five texts, two of them the same, and of things that are none."""
    folder = tmp_path / "texts"
    (folder / "within").mkdir(parents=True)
    for name, text in {"b.md": "prose", "a.py": "code", "within/c.txt": "more", "within/d.txt": "more"}.items():
        (folder / name).write_text(text)
    (folder / "bytes.txt").write_bytes(b"\xff")
    (folder / "empty.txt").touch()
    (folder / "picture.png").write_bytes(b"picture")
    return folder


def test_texts_are_collected_once_and_prose_first(tool: ModuleType, tmp_path: Path, texts: Path) -> None:
    def collected(megabytes: float) -> set[str]:
        shards = tool.collect([texts], megabytes, tmp_path / "work")
        return {text for shard in shards for text in tool.read_documents(shard)}

    assert collected(1.0) == {"prose", "code", "more"}
    assert collected(0.00015) == {"prose", "more"}


def test_the_same_texts_give_the_same_shards(tool: ModuleType, tmp_path: Path, texts: Path) -> None:
    first, second = (tool.collect([texts], 1.0, tmp_path / name)[0].read_bytes() for name in ("one", "two"))
    assert first == second


@pytest.mark.full
def test_stages_and_commands_are_measured(
    tool: ModuleType,
    tmp_path: Path,
    texts: Path,
    small_tokenizer_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tool, "in_own_process", lambda call, *arguments: call(*arguments))
    work, figures = tmp_path / "work", tmp_path / "figures.json"
    arguments = ["--text", str(texts), "--work", str(work), "--tokenizer", str(small_tokenizer_file)]
    assert tool.main([*arguments, "--workers", "1", "--json", str(figures)]) == 0
    assert [path.name for path in work.iterdir()] == ["shard-000.json.gz"]
    found = json.loads(figures.read_text())
    assert [(one["backend"], one["workers"]) for one in found["end_to_end"]] == [("gigatoken", 1), ("sentencepiece", 1)]
    assert len(found["outputs"]) == 1  # both wrote the same tokens
    assert all(one["cpu_seconds"] > 0 and one["peak_bytes"] for one in found["end_to_end"])
    seconds = found["stages"][f"{small_tokenizer_file.name}, gigatoken"]["cpu_seconds"]
    assert {"JSON", "tokenizer"} <= set(seconds)
    assert "gigatoken makes" in capsys.readouterr().out


def test_ids_are_held_against_the_exact_library(
    tool: ModuleType, tmp_path: Path, texts: Path, small_tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_fanformer.preparation.id_encoders import ExactEncoder

    shard = tool.collect([texts], 1.0, tmp_path / "work")[0]
    assert tool.verify_file((str(small_tokenizer_file), shard))[::2] == (3, None)

    def one_too_many(encoder: ExactEncoder, batch: list[str]) -> object:
        ids, counts = exact(encoder, batch)
        ids[-1] += 1
        return ids, counts

    exact = ExactEncoder.encode_batch
    monkeypatch.setattr(ExactEncoder, "encode_batch", one_too_many)
    monkeypatch.setattr(tool, "choose_encoder", exact_plan)
    assert "document 3" in tool.verify_file((str(small_tokenizer_file), shard))[2]


def exact_plan(tokenizer: object, *_: object) -> object:
    """A plan by the exact library alone."""
    from megatron_fanformer.preparation.id_encoders import choose_encoder

    return choose_encoder(tokenizer, "sentencepiece", 0)  # type: ignore[arg-type]
