"""Jobs: each checkpoint is measured as it is alone, and requests have the end of text that it states."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_fanformer.cli import main, read_command
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate.config import EvaluationRequest
from megatron_fanformer.evaluate.evaluate import read_request
from megatron_fanformer.evaluate.jobs import Jobs, find_jobs
from megatron_fanformer.evaluate.requests import read_requests
from tests.generate.making import write_tokenizer


def asked(*arguments: object) -> EvaluationRequest:
    _, options = read_command(["evaluate", *map(str, arguments)])
    return read_request(options)


@pytest.fixture
def other(exported_folder: Path, tmp_path: Path) -> Path:
    """The export, which states another end of text than its tokenizer has."""
    shutil.copytree(exported_folder, folder := tmp_path / "other")
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, "eos_token_id": 7}))
    return folder


@pytest.mark.parametrize(
    "changed", [{"eos_token_id": 7}, {"max_position_embeddings": 5}, {"vocab_size": 240}, {}], ids=str
)
def test_each_checkpoint_is_measured_as_it_is_alone(
    changed: dict[str, int], run_folder: Path, exported_folder: Path, tmp_path: Path
) -> None:
    """Of checkpoints that differ in their end of text, sequence length, vocabulary or tokenizer."""
    np.resize(np.array([1, 2, 7, 0, 3, 4, 5, 6, 8, 230], "<u2"), 300).tofile(tmp_path / "tokens.npy")
    shutil.copytree(exported_folder, other := tmp_path / "other")
    stated = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(stated | changed))
    if not changed:
        shutil.copy(write_tokenizer(tmp_path, vocab_size=200), other / "tokenizer.json")
    sets = ["--perplexity", f"own={tmp_path / 'tokens.npy'}"]
    first, second, third = (job.survey.sets for job in find_jobs(asked(exported_folder, other, run_folder, *sets)).jobs)
    for found, path in ((first, exported_folder), (second, other), (third, run_folder)):
        (alone,) = find_jobs(asked(path, *sets)).jobs
        assert found == alone.survey.sets
    assert first == third != second


def test_requests_have_the_end_of_text_that_the_checkpoints_state(
    run_folder: Path,
    exported_folder: Path,
    tokenizer_file: Path,
    other: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"context": "", "choices": ["4", "5"], "answer": 0}))

    def prepared(*arguments: object) -> Jobs:
        return find_jobs(asked(*arguments, "--tasks", file))

    def first(jobs: Jobs) -> int:
        return int(jobs.jobs[0].survey.tasks["own:q"].ids[0])

    own = load_tokenizer(tokenizer_file).eod_id
    assert (first(prepared(run_folder, exported_folder)), first(prepared(other))) == (own, 7)
    with pytest.raises(InputError, match=rf"2 tokenizers \(.* with end of text {own}, .* with end of text 7\)"):
        prepared(run_folder, other)
    assert first(prepared(run_folder, other, "--eod-id", 9)) == 9
    by_hand = tmp_path / "by-hand.safetensors"
    prepare = ["evaluate", "--prepare", by_hand, "--tasks", file, "--tokenizer", tokenizer_file, "--eod-id", 7]
    assert main([str(argument) for argument in prepare]) == 0
    assert read_requests(by_hand).sha256 == prepared(other).requests
