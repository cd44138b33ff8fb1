"""What `generate` prints, and the files of prompts that it reads."""

import json

import pytest

from megatron_fanformer.cli import main
from megatron_fanformer.errors import InputError
from megatron_fanformer.generate.config import GenerateConfig
from megatron_fanformer.generate.generate import generate, print_generations
from megatron_fanformer.generate.verbs import read_prompts


@pytest.fixture
def printed(run_folder):
    """`printed(*prompts, **settings)`: the pieces that are written."""

    def run(*prompts, **settings):
        pieces = []
        config = GenerateConfig(checkpoint=str(run_folder), prompts=prompts, max_new_tokens=6, **settings)
        print_generations(config, pieces.append)
        return pieces

    return run


def test_a_single_text_is_written_as_it_comes(printed, run_folder):
    (whole,) = generate(GenerateConfig(checkpoint=str(run_folder), prompts=("def",), max_new_tokens=6))
    pieces = [piece for piece in printed("def") if piece]
    assert "".join(pieces) == "def" + whole.text + "\n"
    assert len(pieces) > 4


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_several_texts_are_written_in_order(printed, run_folder, batch_size):
    asked = {"temperature": 1.0, "num_samples": 2, "max_new_tokens": 6}
    texts = [one.text for one in generate(GenerateConfig(checkpoint=str(run_folder), prompts=("a", "bcd"), **asked))]
    message = "".join(printed("a", "bcd", temperature=1.0, num_samples=2, batch_size=batch_size))
    heads = [f"--- prompt {prompt}, sample {sample}\n" for prompt in (1, 2) for sample in (1, 2)]
    blocks = zip(heads, ("a", "a", "bcd", "bcd"), texts, strict=True)
    assert message == "\n".join(f"{head}{prompt}{text}\n" for head, prompt, text in blocks)


def test_json_has_a_line_for_each_text(printed):
    lines = [json.loads(line) for line in "".join(printed("a", "bcd", json=True)).splitlines()]
    assert [(line["prompt"], line["sample"], line["ended_by"]) for line in lines] == [
        ("a", 0, "length"),
        ("bcd", 0, "length"),
    ]
    assert all(len(line["ids"]) == 6 for line in lines)


def test_the_verb_takes_prompts_from_the_line_and_from_a_file(run_folder, tmp_path, capsys, run_on_ranks):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "two\\nlines"}\n\n{"prompt": "three", "id": 3}\n')
    asked = ["generate", str(run_folder), "--prompt", "one", "--prompts", str(file), "--max-new-tokens", "2"]
    assert main([*asked, "--json", "--stop", "\N{SNOWMAN}"]) == 0
    prompts = [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()]
    assert prompts == ["one", "two\nlines", "three"]


def test_a_text_file_has_a_prompt_a_line(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("one \r\n\n  {two\nthree\u2028é".encode())
    assert read_prompts(file) == ["one ", "  {two", "three\u2028é"]
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree")
    assert read_prompts(file) == ["one", "two\rthree"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "cannot be read (No such file"),
        ("latin.txt", b"\xe9", "not valid UTF-8"),
        ("bare.jsonl", b'{"prompt": "a"}\n"b"', "line 2 of prompts"),
        ("half.jsonl", b'{"prompt": "a"}\n{"prompt": "\\ud800"}', "line 2 of prompts"),
    ],
)
def test_files_that_hold_no_prompts_are_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_prompts(tmp_path / name)
    assert message in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)
