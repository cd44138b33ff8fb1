"""From documents to `prepare` to a training step, and back to the documents: every passage is a part of its line."""

import gzip
import json
from pathlib import Path

import pytest

from megatron_fanformer.cli import main
from tests.conftest import SAMPLES
from tests.inspection.conftest import TOKENIZER, Inspect
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
    said = inspect(prefix, "--config", config, "--step", 2, "--full", "--json")  # the tokenizer is the manifest's
    assert (said.code, said.error) == (0, "")
    step = json.loads(said.out)
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
