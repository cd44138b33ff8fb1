"""From documents to `prepare` to a training step, and back to the documents: every passage is a part of its line."""

import gzip
import json
from pathlib import Path

import pytest

from megatron_fanformer.cli import main
from megatron_fanformer.data import remote_files
from tests.conftest import SAMPLES
from tests.data.failing_stores import planned
from tests.inspect.conftest import TOKENIZER, Inspect
from tests.small_runs import small_run, write_config

pytestmark = pytest.mark.usefixtures("forked_workers")

END = "<|endoftext|>"


def prepared(folder: Path, *options: str) -> Path:
    """The sample documents as token files; their prefix."""
    prefix = folder / "docs"
    inputs = str(SAMPLES / "dolma")
    arguments = [inputs, "--output", str(prefix), "--tokenizer", str(TOKENIZER), "--workers", "1", *options]
    assert main(["prepare", *arguments]) == 0
    return prefix


@pytest.mark.parametrize(
    ("options", "data"),
    [
        ([], "{prefix}"),
        (["--format", "npy"], "{prefix}.npy"),
        (["--part-size", "8000"], "@{prefix}.blend"),
    ],
    ids=["pair", "npy", "parts"],
)
def test_a_step_leads_back_to_the_documents(inspect: Inspect, tmp_path: Path, options: list[str], data: str) -> None:
    prefix = prepared(tmp_path, *options)
    assert inspect(prefix, "--verify").code == 0
    assert inspect(data.format(prefix=prefix), "--verify").code == 0
    values = small_run(
        data.format(prefix=prefix),
        tmp_path / "run",
        model={"vocab_size": 50_280, "seq_length": 512},
        training={"train_iters": 2, "global_batch_size": 8},
    )
    config = write_config(tmp_path / "run.yaml", values)
    shown = inspect(prefix, "--config", config, "--step", 2, "--full", "--json")  # the tokenizer is the manifest's
    assert (shown.code, shown.error) == (0, "")
    step = json.loads(shown.out)
    samples = [sample for batch in step["micro_batches"] for sample in batch["samples"]]
    passages = [passage for sample in samples for passage in sample["passages"]]
    assert len(samples) == 8
    assert len(passages) > 8
    for passage in passages:
        document = passage["document"]
        lines = gzip.decompress(Path(document["shard"]).read_bytes()).splitlines()
        line = json.loads(lines[document["line"] - 1])
        assert (document["id"], document["source"]) == (line.get("id"), line.get("source"))
        assert passage["text"].strip("\ufffd") in line["text"] + END
        if document["first_token"] == 0:
            assert line["text"].startswith(passage["text"].removesuffix(END).rstrip("\ufffd"))


def test_token_files_on_another_store_are_shown_and_verified_as_here(
    inspect: Inspect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    prefix = prepared(tmp_path, "--part-size", "8000")

    def shown(place: str, *options: str) -> str:
        remote_files.forget()
        found = inspect(place, *options)
        assert found.error == ""
        return found.out.replace(url, str(tmp_path))

    with planned(tmp_path) as url:
        for name in ("docs", "docs-00001"):  # the whole, and a part with its ledger
            assert shown(f"{url}/{name}", "--verify") == shown(f"{tmp_path}/{name}", "--verify")
        ledger, tokens = (prefix.with_name(f"docs-00001{suffix}") for suffix in (".ledger.parquet", ".bin"))
        for file in (ledger, tokens):
            sound = file.read_bytes()
            file.write_bytes(sound[:-9] + b"\xee" + sound[-8:])
            remote_files.forget()
            found = inspect(f"{url}/docs", "--verify")
            assert (found.code, found.error.split(" ")[0]) == (3, f"{url}/{file.name}")
            file.write_bytes(sound)
        tokens.unlink()
        remote_files.forget()
        found = inspect(f"{url}/docs", "--verify")
        assert found.code == 3 and f"{url}/docs-00001.bin, which its manifest lists, is not there" in found.error
