"""Perplexity sets: found, cut into chunks, and their bytes."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate.config import SETS, EvaluationConfig, PerplexityConfig
from megatron_fanformer.evaluate.requests import cut_to_context
from megatron_fanformer.evaluate.survey import PerplexitySet, find_sets, set_problems, survey_evaluation
from megatron_fanformer.prepare.prepare import prepare
from megatron_fanformer.prepare.verb import PrepareConfig
from tests.data.token_making import write_npy, write_pair
from tests.evaluate.made_up import made_up_tasks, write_made_up

VOCAB_SIZE = 600


def sets_of(config: PerplexityConfig, **fields: Any) -> list[PerplexitySet]:
    return find_sets(config, **{"seq_length": 8, "vocab_size": VOCAB_SIZE, **fields})


def survey(config: EvaluationConfig, tokenizer: Path, **fields: Any) -> None:
    survey_evaluation(config, tokenizer=str(tokenizer), **{"seq_length": 64, "vocab_size": VOCAB_SIZE, **fields})


def own(path: Path | str, **fields: Any) -> PerplexityConfig:
    return PerplexityConfig(sets={"own": [str(path)]}, **fields)


@pytest.mark.parametrize(
    ("group", "form"),
    [("v2-small", "v2_small_gptneox20b/{}/val.npy"), ("v3-small", "v3_small_gptneox20b/{}/val/part-0-00000.npy")],
)
def test_a_group_is_found_as_olmo_lays_it_out(tmp_path: Path, group: Any, form: str) -> None:
    for number, name in enumerate(SETS[group]):
        file = tmp_path / form.format(name)
        file.parent.mkdir(parents=True)
        np.full(20, number, "<u2").tofile(file)
    sets = sets_of(config := PerplexityConfig(groups=[group], folder=str(tmp_path)))
    assert [one.name for one in sets] == [f"{group}-{name}-validation" for name in SETS[group]]
    assert [{*one.read(one.chunks()[1])} for one in sets] == [{number} for number in range(len(sets))]
    file.unlink()
    (problem,) = set_problems(config)
    assert f"{group[:2]}_small_gptneox20b/wikitext_103/val" in problem and "names no token files" in problem


def test_missing_sets_are_named_at_once(tmp_path: Path) -> None:
    config = PerplexityConfig(sets={"a": [str(tmp_path / "none")], "b": [f"{tmp_path}/*.npy"]})
    with pytest.raises(InputError, match=r"/none, .*/\*\.npy names no token files; name a .npy file"):
        sets_of(config)


@pytest.mark.usefixtures("without_home")  # files of this machine need no cache
def test_tokens_are_cut_by_file_and_tails_dropped(tmp_path: Path) -> None:
    write_npy(tmp_path / "a.npy", 20)
    write_pair(tmp_path / "b", [[5], [3, 4], [6]])  # 18 tokens, whose documents are not told apart
    (one,) = sets_of(own(tmp_path))
    assert one.chunks().tolist() == [[0, 0], [0, 8], [1, 0], [1, 8]]
    raw = np.fromfile(tmp_path / "b.bin", "<u2")
    assert one.read(one.chunks()[3]).tolist() == raw[8:16].tolist()


def test_a_limit_counts_tokens_from_the_beginning(tmp_path: Path) -> None:
    write_npy(tmp_path / "a.npy", 100)
    for tokens, chunks in ((24, 3), (25, 4)):  # of 8
        (one,) = sets_of(own(tmp_path, limit_tokens=tokens, chunk_tokens=8))
        assert len(one.chunks()) == chunks


TEXTS = ("Grüße aus Köln. " * 40, "def f(x):\n    return [x]\n" * 40)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, small_tokenizer_file: Path) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "documents.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    paths = {"output": str(folder / "tokens"), "tokenizer": str(small_tokenizer_file)}
    prepare(PrepareConfig(inputs=(str(folder / "documents.jsonl"),), workers=1, **paths))
    return folder / "tokens"


def test_bytes_are_those_of_the_manifest_or_of_the_text_decoded(
    prepared: Path, small_tokenizer_file: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(small_tokenizer_file)
    (stated,) = sets_of(own(prepared))
    assert stated.bytes_per_token == len("".join(TEXTS).encode()) / stated.files[0].tokens
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{prepared}{suffix}", tmp_path / f"tokens{suffix}")
    (decoded,) = sets_of(own(tmp_path / "tokens"), tokenizer=tokenizer)
    scored = [decoded.read(chunk)[1:].tolist() for chunk in decoded.chunks()]
    texts = [tokenizer.decode([token for token in ids if token != tokenizer.eod_id]) for ids in scored]
    assert decoded.bytes_per_token == sum(len(text.encode()) for text in texts) / (7 * len(scored))
    (unknown,) = sets_of(own(tmp_path / "tokens"))
    assert unknown.bytes_per_token is None


def test_a_set_of_another_tokenizer_is_told(
    prepared: Path, small_tokenizer_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in prepared.parent.glob("tokens*"):
        shutil.copy(file, tmp_path)
    manifest = tmp_path / "tokens.manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace(json.loads(text)["tokenizer"]["sha256"], "f" * 64))
    for prefix, expected in (
        (prepared, ""),
        (tmp_path / "tokens", "set own was made with another tokenizer (SHA-256 fff"),
    ):
        survey(EvaluationConfig(perplexity=own(prefix)), small_tokenizer_file)
        assert expected in caplog.text and bool(expected) == bool(caplog.text)


def test_problems_of_all_tasks_and_of_the_tokenizer_are_told_at_once(
    small_tokenizer_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = {name: cut_to_context(task, 8) for name, task in made_up_tasks(VOCAB_SIZE, 16).items()}
    digest = sha256_of(small_tokenizer_file)
    requests = write_made_up(tmp_path / "requests", tasks, tokenizer_sha256=digest, context_length=8)
    with caplog.at_level("INFO"):
        survey(EvaluationConfig(requests=requests), small_tokenizer_file)
    assert "task piqa: " in caplog.text and "requests are cut to 8 tokens" in caplog.text
    config = EvaluationConfig(requests=requests, perplexity=own(tmp_path))
    for fields, problem in (({"seq_length": 1}, "has a continuation of"), ({"vocab_size": 9}, "has token id")):
        with pytest.raises(InputError) as refused:
            survey(config, small_tokenizer_file, **fields, end_of_text_id=VOCAB_SIZE * 10)
        *of_tasks, of_tokenizer = str(refused.value).splitlines()
        assert len(of_tasks) == len(tasks) and of_tokenizer.startswith("end-of-text id 6000 is outside")
        for name, line in zip(tasks, of_tasks, strict=True):
            assert line.startswith(f"evaluation.requests: task {name} {problem}")
