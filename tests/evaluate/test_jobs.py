"""What ends a text in `evaluate`: as stated, as a set's manifest says, as an export states, or the tokenizer's."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from megatron_fanformer.cli import main, read_command
from megatron_fanformer.convert.recognition import find_checkpoint
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate.config import EvaluationRequest
from megatron_fanformer.evaluate.evaluate import read_request
from megatron_fanformer.evaluate.jobs import Jobs, find_jobs
from megatron_fanformer.evaluate.requests import read_requests
from tests.generate.making import write_checkpoint, write_export, write_tokenizer
from tests.small_runs import RunOnRanks

CASE = "fanformer-tied"


class Made(NamedTuple):
    """A run and an export of one model, and its tokenizer."""

    tokenizer: Path
    run: Path
    export: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, run_on_ranks: RunOnRanks) -> Made:
    folder = tmp_path_factory.mktemp("ends")
    found = Made(write_tokenizer(folder), folder / "run", folder / "export")
    run_on_ranks(1, write_checkpoint, found.run, CASE, found.tokenizer)
    write_export(found.export, CASE, found.tokenizer)
    return found


def asked(*arguments: object) -> EvaluationRequest:
    _, options = read_command(["evaluate", *map(str, arguments)])
    return read_request(options)


@pytest.fixture
def other(made: Made, tmp_path: Path) -> Path:
    """The export, which states another end of text than its tokenizer has."""
    shutil.copytree(made.export, folder := tmp_path / "other")
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, "eos_token_id": 7}))
    return folder


@pytest.mark.parametrize(
    ("changed", "lengths"),
    [
        ({"eos_token_id": 7}, [3, 7]),
        ({"max_position_embeddings": 5}, [4, 5, 2]),
        ({"vocab_size": 240}, [4, 6]),
        ({}, [4, 6]),  # with another tokenizer
    ],
)
def test_each_checkpoint_is_measured_as_it_is_alone(
    changed: dict[str, int], lengths: list[int], made: Made, tmp_path: Path
) -> None:
    """Of checkpoints that differ in their end of text, sequence length, vocabulary or tokenizer."""
    np.array([1, 2, 7, 0, 3, 4, 5, 6, 8, 230], "<u2").tofile(tmp_path / "tokens.npy")
    shutil.copytree(made.export, other := tmp_path / "other")
    stated = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(stated | changed))
    if not changed:
        shutil.copy(write_tokenizer(tmp_path, vocab_size=200), other / "tokenizer.json")
    sets = ["--perplexity", f"own={tmp_path / 'tokens.npy'}", "--chunking", "documents"]
    first, second, third = (job.survey.sets for job in find_jobs(asked(made.export, other, made.run, *sets)).jobs)
    assert [each.pieces()[:, 2].tolist() for (each,) in (first, second)] == [[4, 6], lengths]
    for found, path in ((first, made.export), (second, other), (third, made.run)):
        (alone,) = find_jobs(asked(path, *sets)).jobs
        assert found == alone.survey.sets
    assert first == third != second


def test_requests_have_the_end_of_text_that_the_checkpoints_state(
    made: Made, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"context": "", "choices": ["4", "5"], "answer": 0}))

    def prepared(*arguments: object) -> Jobs:
        return find_jobs(asked(*arguments, "--tasks", file))

    def first(jobs: Jobs) -> int:
        return int(jobs.jobs[0].survey.tasks["own:q"].ids[0])

    own = load_tokenizer(made.tokenizer).eod_id
    assert (first(prepared(made.run, made.export)), first(prepared(other))) == (own, 7)
    with pytest.raises(InputError, match=rf"2 tokenizers \(.* with end of text {own}, .* with end of text 7\)"):
        prepared(made.run, other)
    assert first(prepared(made.run, other, "--eod-id", 9)) == 9
    shutil.copytree(made.run, run := tmp_path / "run")  # of the same tokenizer, with an end of text that was stated
    (find_checkpoint(run) / "generation_config.json").write_text('{"eos_token_id": 8}')
    assert first(prepared(run)) == 8
    with pytest.raises(InputError, match=rf"with end of text {own}, .* with end of text 8\)"):
        prepared(made.run, run)
    by_hand = tmp_path / "by-hand.safetensors"
    prepare = ["evaluate", "--prepare", by_hand, "--tasks", file, "--tokenizer", made.tokenizer, "--eod-id", 7]
    assert main([str(argument) for argument in prepare]) == 0
    assert read_requests(by_hand).sha256 == prepared(other).requests
