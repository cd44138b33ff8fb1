"""The verb `evaluate`: what it prints and writes, of one checkpoint and of several, and what it refuses."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_fanformer.checkpoint.manifest import write_manifest
from megatron_fanformer.cli import main, read_command
from megatron_fanformer.convert.recognition import find_checkpoint
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate.config import EvaluationRequest
from megatron_fanformer.evaluate.evaluate import read_request
from megatron_fanformer.evaluate.jobs import Jobs, find_jobs
from megatron_fanformer.evaluate.requests import read_requests, write_requests
from megatron_fanformer.evaluate.results import Result, result_lines
from tests.evaluate.made_up import made_up_requests
from tests.generate.making import model_and_tensors, write_tokenizer
from tests.whole_models import export_huggingface

VOCAB_SIZE = 250
RUN, TOKENS, REQUESTS, OTHER = "RUN", "own=TOKENS", "REQUESTS", "OTHER"
LARGER = "LARGER"
QUESTION = {"prompt": "2 + 2 = 4. " * 100, "stop": ["Q"], "max_new_tokens": 8, "solution": ""}
"""Too long for the model, so that its beginning is cut."""


class Made:
    """What the tests evaluate, in one folder."""

    def __init__(self, folder: Path, run_folder: Path, exported_folder: Path, tokenizer_file: Path) -> None:
        self.tokenizer, self.export = tokenizer_file, exported_folder
        self.run = shutil.copytree(run_folder, folder / "run", symlinks=True)
        first = find_checkpoint(self.run)
        shutil.copytree(first, first.with_name("step-00000040"))
        write_manifest(first.with_name("step-00000040"), 40)
        self.tokens = folder / "tokens.npy"
        np.random.default_rng(0).integers(1, VOCAB_SIZE, size=300).astype("<u2").tofile(self.tokens)
        self.requests = folder / "requests.safetensors"
        self.write(self.requests, sha256_of(self.tokenizer))
        self.write(folder / "other.safetensors", "0" * 64)
        self.places = {
            RUN: self.run,
            TOKENS: f"own={self.tokens}",
            REQUESTS: self.requests,
            OTHER: folder / "other.safetensors",
            LARGER: write_tokenizer(folder, vocab_size=600),
        }
        """By the words for them in the arguments of the tests."""

    def write(self, path: Path, tokenizer_sha256: str) -> None:
        made = partial(made_up_requests, neutral=False, vocab_size=VOCAB_SIZE)
        tasks = [
            made([4] * 9, name="hellaswag", metric="len_norm", seed=1),
            made([2] * 7, name="mrpc", metric="f1", seed=2),
        ]
        write_requests(
            path,
            tokenizer_sha256=tokenizer_sha256,
            context_length=64,
            versions={},
            tasks={task.name: task for task in tasks},
            texts={"gsm8k": [{**QUESTION, "doc_id": number, "answer": answer} for number, answer in enumerate("40")]},
        )


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, run_folder: Path, exported_folder: Path, tokenizer_file: Path
) -> Made:
    return Made(tmp_path_factory.mktemp("evaluated"), run_folder, exported_folder, tokenizer_file)


def evaluate(*arguments: object) -> int:
    return main(["evaluate", *map(str, arguments), *([] if "--device" in arguments else ["--device", "cpu"])])


def everything(made: Made) -> list[object]:
    tasks = ["--requests", made.requests, "--tasks", "hellaswag", "mrpc"]
    return [*tasks, "--perplexity", f"own={made.tokens}", "--chunk-tokens", 32]


def test_a_run_is_evaluated_on_tasks_and_sets(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(made.run, *everything(made), "--output", tmp_path / "result.json") == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["checkpoint"] == str(find_checkpoint(made.run)) and found["checkpoint"].endswith(heading.strip())
    chunks = {"chunk_tokens": 32, "limit_tokens": None, "batch_tokens": 8192}
    assert found["settings"] == {**chunks, "dtype": "float32", "max_new_tokens": None}
    assert found["tokenizer"] == sha256_of(made.tokenizer)
    assert found["step"] == 0
    assert {"megatron_fanformer", "torch", "megatron-core"} <= set(found["versions"])
    assert len(found["requests"]) == 64
    own = found["perplexity"]["own"]
    assert own["tokens"] == 9 * 31
    assert own["perplexity"] == pytest.approx(np.exp(own["loss"]))
    # a character, of one byte or two, for every token
    scored = np.fromfile(made.tokens, "<u2")[: 9 * 32].reshape(9, 32)[:, 1:].flatten().tolist()
    size = len("".join(map(chr, scored)).encode())
    assert own["bits_per_byte"] == pytest.approx(own["loss"] / np.log(2) * 279 / size, rel=1e-9)
    assert ["own", "bits/byte", f"{own['bits_per_byte']:.4f}"] in [row.split() for row in rows]
    hellaswag = found["tasks"]["hellaswag"]
    assert hellaswag["metric"] == "len_norm"
    assert [document["doc_id"] for document in hellaswag["documents"]] == list(range(9))
    right = []
    for document in hellaswag["documents"]:
        normed = np.divide(document["log_probabilities"], document["lengths"])
        right.append(float(normed.argmax() == document["label"]))
        assert (document["score"], document["weight"]) == (right[-1], 1)
    value = hellaswag["metrics"]["len_norm"]
    assert (value["value"], value["documents"]) == (pytest.approx(np.mean(right)), 9)
    f1 = found["tasks"]["mrpc"]
    weights = sum(document["weight"] for document in f1["documents"])
    expected = sum(document["score"] for document in f1["documents"]) / weights
    assert f1["metrics"]["f1"]["value"] == pytest.approx(expected)


def test_an_export_comes_to_the_same_and_is_compared_with_it(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("megatron_fanformer.evaluate.survey.read_requests")  # once is enough
    of_run, of_export, output = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "comparison.json"
    for model, file in ((made.run, of_run), (made.export, of_export)):
        assert evaluate(model, *everything(made), "--limit", "5", "--output", file) == 0
    capsys.readouterr()
    assert evaluate("--compare", of_run, of_export, "--output", output) == 0
    compared = json.loads(output.read_text())
    assert [compared[which] for which in "ab"] == [str(find_checkpoint(made.run)), str(made.export)]
    for task in (*compared["tasks"].values(), compared["mean"]):
        assert (task["difference"], task["interval"]) == (0, [0, 0])
    a, b = compared["perplexity"]["own"]
    assert a == b
    shown = capsys.readouterr().out
    assert re.search(r"hellaswag +\S+ +\S+ +\+0.00 +\+0.00 to \+0.00", shown)
    assert compared["tasks"]["hellaswag"]["documents"] == 5
    (tmp_path / "bad.json").write_text("[")
    assert evaluate("--compare", tmp_path / "bad.json", of_export) == 3


def test_tasks_without_requests_are_prepared_once(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, output = tmp_path / "q.jsonl", tmp_path / "result.json"
    stated = {"context": "2 + 2 =", "choices": ["4", "5"], "answer": 0}
    file.write_text("".join(json.dumps({**stated, "context": f"{number} ="}) + "\n" for number in range(5)))
    task = [made.export, "--tasks", file, "--limit", 3, "--output", output]
    for prepared in (True, False):
        assert evaluate(*task) == 0
        shown = capsys.readouterr()
        assert ("own:q: 6 requests, 0 of them cut" in shown.err) == prepared
        assert shown.out.splitlines()[-1].startswith("own:q  acc")
    (kept,) = (tmp_path / "cache" / "megatron-fanformer" / "requests").iterdir()
    first = json.loads(output.read_text())
    assert (first["requests"], len(first["tasks"]["own:q"]["documents"])) == (read_requests(kept).sha256, 3)
    kept.write_bytes(kept.read_bytes()[:-1])  # damaged: made again
    assert evaluate(*task) == 0
    assert json.loads(output.read_text())["requests"] == first["requests"]
    # a request file of it, by its name there
    assert evaluate(made.export, "--requests", kept, "--tasks", "own:q", "--output", output) == 0
    assert list(json.loads(output.read_text())["tasks"]) == ["own:q"]
    capsys.readouterr()
    assert evaluate(made.export, "--requests", kept, "--tasks", file) == 2
    assert f"--tasks {file} is a file of questions, and --requests is prepared already" in capsys.readouterr().err
    file.write_text("[]")
    assert evaluate(*task) == 2
    assert capsys.readouterr().err.count("q.jsonl:1: it is no question") == 1


def test_several_checkpoints_are_columns_of_a_table(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "results.json"
    assert evaluate(made.run / "checkpoints", *everything(made), "--output", output) == 0
    first, second = json.loads(output.read_text())
    assert (first["step"], second["step"]) == (0, 40)
    assert first["tasks"] == second["tasks"]
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["step-00000000", "step-00000040"]
    assert [row.split()[:2] for row in rows] == [
        ["hellaswag", "len_norm"],
        ["mrpc", "f1"],
        ["mean", "of"],
        *(["own", metric] for metric in ("loss", "perplexity", "bits/byte")),
    ]
    assert evaluate("--compare", output, output) == 2
    assert "is not the result of one checkpoint" in capsys.readouterr().err


def test_checkpoints_are_named_by_what_differs_in_their_paths() -> None:
    paths = ("runs/a/checkpoints/step-00000040", str(Path.cwd() / "runs" / "b"))
    heading, *_ = result_lines([Result(checkpoint=path, versions={}) for path in paths])
    assert heading.split() == ["a/checkpoints/step-00000040", "b"]


def read(*arguments: object, world_size: int | None = None) -> EvaluationRequest:
    _, options = read_command(["evaluate", *map(str, arguments)])
    return read_request(options, world_size=world_size)


def test_checkpoints_are_found_by_any_of_their_names(made: Made) -> None:
    folder = made.run / "checkpoints"
    first, second = steps = tuple(folder / f"step-{step:08d}" for step in (0, 40))
    for names, expected in (([folder], steps), ([second, folder], steps[::-1]), ([made.run, first], (first,))):
        assert read(*names, "--requests", made.requests).checkpoints == expected


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp=2,sp=true,fan=sequence", "dp=2", "pp=3"])
def test_local_ranks_come_to_the_same(made: Made, tmp_path: Path, layout: str) -> None:
    found = []
    for number, arguments in enumerate(([], ["--layout", layout])):
        output = tmp_path / f"{number}.json"
        assert evaluate(made.export, *everything(made), *arguments, "--output", output) == 0
        found.append(json.loads(output.read_text()))
    alone, spread = found
    assert spread["perplexity"]["own"]["loss"] == pytest.approx(alone["perplexity"]["own"]["loss"], rel=1e-5)
    for name, task in spread["tasks"].items():
        for own, other in zip(task["documents"], alone["tasks"][name]["documents"], strict=True):
            assert own["log_probabilities"] == pytest.approx(other["log_probabilities"], rel=1e-4)


GSM8K = ("--requests", REQUESTS, "--tasks", "gsm8k")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no checkpoint is named"),
        (["nowhere"], "nowhere does not exist; name a run's folder"),
        ([RUN], "nothing is asked for; add --tasks TASK, --requests FILE, or --perplexity NAME=PATH"),
        ([RUN, "--requests", REQUESTS, "--tasks", "piqa"], "has no requests of piqa, but of hellaswag, mrpc"),
        ([RUN, "--requests", OTHER], "were made with another tokenizer"),
        ([RUN, "--requests", REQUESTS, "--layout", "dp=2"], "gsm8k: a model writes its answers in one process"),
        ([RUN, "--perplexity", "v4-small"], "--perplexity v4-small is no group (v2-small, v3-small)"),
        ([RUN, "--perplexity", "own=none"], "--perplexity: none names no token files; name a .npy file"),
        ([RUN, "--perplexity", TOKENS, "--chunk-tokens", "290"], "--chunk-tokens is 290, longer than the"),
        ([RUN, "--perplexity", TOKENS, "--limit", "2"], "--limit has no effect without --tasks or --requests"),
        ([RUN, "--prepare", "out"], "CHECKPOINT, --compare and --prepare are three commands"),
        (["--prepare", "out", "--output", "x"], "--output has no effect without CHECKPOINT or --compare; add that"),
        (["--prepare", REQUESTS, "--tasks", "piqa", "--tokenizer", LARGER], "already exists; name another file"),
        ([RUN, *GSM8K, "--max-new-tokens", "500"], "max_new_tokens is 500, which leaves no room for a prompt in"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(
    made: Made, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert evaluate(*(made.places.get(argument, argument) for argument in arguments)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if message in line]
    assert line.startswith("megatron-fanformer: ")


@pytest.mark.parametrize("asked", [["--perplexity", "own=TOKENS"], ["--requests", REQUESTS, "--tasks", "mrpc"]])
def test_a_model_that_diverged_has_bad_numbers(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: list[str]
) -> None:
    config, tensors = model_and_tensors("fanformer-tied")
    tensors["decoder.final_layernorm.weight"] = torch.full_like(tensors["decoder.final_layernorm.weight"], torch.nan)
    export_huggingface(config, tensors, tmp_path / "export", dtype=torch.float32, tokenizer=made.tokenizer, eod_id=0)
    output = tmp_path / "result.json"
    asked = [str(made.places.get(word, word)) for word in asked]
    assert evaluate(tmp_path / "export", *asked, "--output", output) == 4
    assert "the model diverged: evaluate an earlier checkpoint" in capsys.readouterr().err
    assert not output.exists()
    # what was evaluated before it is kept
    assert evaluate(made.export, tmp_path / "export", made.run, *asked, "--output", output) == 4
    assert json.loads(output.read_text())["checkpoint"] == str(made.export)
    assert capsys.readouterr().out.split()[0] == made.export.name


# -- jobs


def changed_export(exported_folder: Path, folder: Path, **fields: int) -> Path:
    shutil.copytree(exported_folder, folder)
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | fields))
    return folder


@pytest.mark.parametrize(
    "changed", [{"eos_token_id": 7}, {"max_position_embeddings": 5}, {"vocab_size": 240}, {}], ids=str
)
def test_each_checkpoint_is_measured_as_it_is_alone(
    changed: dict[str, int], run_folder: Path, exported_folder: Path, tmp_path: Path
) -> None:
    """Of checkpoints that differ in their end of text, sequence length, vocabulary or tokenizer."""
    np.resize(np.array([1, 2, 7, 0, 3, 4, 5, 6, 8, 230], "<u2"), 300).tofile(tmp_path / "tokens.npy")
    other = changed_export(exported_folder, tmp_path / "other", **changed)
    if not changed:
        shutil.copy(write_tokenizer(tmp_path, vocab_size=200), other / "tokenizer.json")
    sets = ["--perplexity", f"own={tmp_path / 'tokens.npy'}"]
    first, second, third = (job.survey.sets for job in find_jobs(read(exported_folder, other, run_folder, *sets)).jobs)
    for found, path in ((first, exported_folder), (second, other), (third, run_folder)):
        (alone,) = find_jobs(read(path, *sets)).jobs
        assert found == alone.survey.sets
    assert first == third != second


def test_requests_have_the_end_of_text_that_the_checkpoints_state(
    run_folder: Path, exported_folder: Path, tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    other = changed_export(exported_folder, tmp_path / "other", eos_token_id=7)
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"context": "", "choices": ["4", "5"], "answer": 0}))

    def prepared(*arguments: object) -> Jobs:
        return find_jobs(read(*arguments, "--tasks", file))

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
