"""The verb `evaluate` on tasks whose answers a model writes: what its file holds is what `generate` writes."""

import json

import pytest

from megatron_fanformer.cli import main
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.evaluate.prepare import documents
from megatron_fanformer.evaluate.requests import write_requests
from megatron_fanformer.generate.generate import generate
from megatron_fanformer.generate.verb import GenerateConfig
from tests.evaluate.oe_data import write_library
from tests.evaluate.test_ulogic import RULES
from tests.generate.making import write_export, write_tokenizer

NEW_TOKENS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An export, its tokenizer, a request file of the three tasks, and ULogic's rules."""
    folder = tmp_path_factory.mktemp("written")
    tokenizer = write_tokenizer(folder)
    write_export(folder / "export", "fanformer-tied", tokenizer)
    library = write_library(folder / "library")
    write_requests(
        folder / "requests",
        tokenizer_sha256=sha256_of(tokenizer),
        context_length=128,
        versions={},
        tasks={},
        texts={name: documents(name, library) for name in ("gsm8k", "humaneval", "mbpp")},
    )
    (folder / "rules.json").write_text(json.dumps(RULES))
    return folder


def evaluate(folder, *arguments):
    asked = [folder / "export", "--requests", folder / "requests", "--max-new-tokens", NEW_TOKENS, "--device", "cpu"]
    return main(["evaluate", *map(str, (*asked, *arguments))])


def test_the_result_holds_what_generate_writes_and_how_programs_ended(folder, tmp_path):
    output = tmp_path / "result.json"
    assert evaluate(folder, "--ulogic", folder / "rules.json", "--allow-code-execution", "--output", output) == 0
    tasks = json.loads(output.read_text())["tasks"]
    assert {name: task["metric"] for name, task in tasks.items()} == {
        "gsm8k": "exact_match",
        "humaneval": "pass@1",
        "mbpp": "pass@1",
        "ulogic": "likelihood",
    }
    asked = documents("gsm8k", folder / "library")
    config = GenerateConfig(
        checkpoint=str(folder / "export"),
        prompts=tuple(document["prompt"] for document in asked),
        stop=tuple(asked[0]["stop"]),
        max_new_tokens=NEW_TOKENS,
    )
    written = [one["samples"][0]["text"] for one in tasks["gsm8k"]["documents"]]
    assert written == [one.text for one in generate(config)]
    assert {len(document["samples"]) for document in tasks["gsm8k"]["documents"]} == {1}
    assert [one["samples"][0]["outcome"] for one in tasks["mbpp"]["documents"]] == ["failed"]  # of a random model
    assert tasks["ulogic"]["metrics"]["generation"]["documents"] == len(RULES)
    assert tasks["ulogic"]["cut"] == 2 * len(RULES)  # the question is longer than the model's 128 tokens
