"""The verb `generate`: text from a checkpoint and from an export, printed and refused; files of prompts."""

import json

import pytest

from megatron_fanformer.cli import main
from megatron_fanformer.convert.recognition import find_checkpoint
from megatron_fanformer.errors import InputError
from megatron_fanformer.generate.generate import generate, print_generations
from megatron_fanformer.generate.verb import GenerateConfig, read_prompts
from tests.generate.making import PROMPT, write_tokenizer


def run_all(folder, *prompts, **settings):
    config = {"checkpoint": str(folder), "prompts": prompts, "max_new_tokens": 24, **settings}
    return list(generate(GenerateConfig(**config)))


def run(folder, prompt=PROMPT, **settings):
    (generation,) = run_all(folder, prompt, **settings)
    return generation


def problems_of(folder, **settings) -> list[str]:
    with pytest.raises(InputError) as caught:
        run_all(folder, *settings.pop("prompts", (PROMPT,)), **settings)
    return str(caught.value).splitlines()


@pytest.fixture(scope="module")
def greedy(run_folder):
    return run(run_folder)


def test_a_checkpoint_its_export_and_a_choice_of_one_token_give_the_same_text(greedy, run_folder, exported_folder):
    assert run(find_checkpoint(run_folder)).ids == greedy.ids
    assert run(exported_folder).ids == greedy.ids
    assert run(run_folder, temperature=2.0, top_k=1).ids == greedy.ids


def test_an_empty_prompt_starts_a_document(run_folder):
    generation = run(run_folder, prompt="", max_new_tokens=5)
    assert generation.prompt_ids == [0]
    assert len(generation.text) == len([token for token in generation.ids if token])


def test_a_stop_string_ends_the_text_before_it(greedy, run_folder):
    stop = greedy.text[10:12]
    stopped = run(run_folder, stop=("never\N{SNOWMAN}", stop))
    assert stopped.text == greedy.text[: greedy.text.index(stop)]
    assert stopped.ended_by == "stop"
    assert greedy.ended_by == "length"


def test_samples_depend_on_their_number_and_prompt_alone(run_folder):
    prompts = ("a = 1", PROMPT, "import ")
    sampled = {"temperature": 1.0, "seed": 3, "num_samples": 3}
    together = run_all(run_folder, *prompts, batch_size=4, **sampled)
    assert [one.prompt_ids for one in together] == [list(prompt.encode()) for prompt in prompts for _ in range(3)]
    own = [one.text for one in together[3:6]]
    assert [one.text for one in run_all(run_folder, PROMPT, batch_size=1, **sampled)] == own
    assert len(set(own)) == 3


def test_all_problems_are_told_together_on_a_line_each(tmp_path):
    found = problems_of(
        tmp_path / "nowhere",
        top_p=0.0,
        top_k=-1,
        seed=-1,
        temperature=-1.0,
        stop=("",),
    )
    subjects = ("temperature", "top_k", "top_p", "seed", "a stop string")
    assert [line for line, subject in zip(found, subjects, strict=True) if not line.startswith(subject)] == []


def test_a_prompt_beyond_the_sequence_length_is_refused(run_folder):
    (problem,) = problems_of(run_folder, prompts=("x", "x" * 130, "xx"))
    assert problem.startswith("prompt 2's 130 tokens")
    assert len(problems_of(run_folder, max_new_tokens=121)) == 1


def test_a_checkpoint_without_a_tokenizer_asks_for_one(run_folder, tmp_path):
    checkpoint = find_checkpoint(run_folder)
    for name in ("metadata.json", "config.yaml"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    (problem,) = problems_of(tmp_path)
    assert problem == f"{tmp_path} holds no tokenizer; name one with --tokenizer"


def test_a_larger_tokenizer_than_the_model_has_ids_is_refused(run_folder, tmp_path):
    (problem,) = problems_of(run_folder, tokenizer=str(write_tokenizer(tmp_path, vocab_size=251)))
    assert "251 ids" in problem
    assert "250" in problem


# -- printed


def test_a_single_text_is_printed_alone(run_folder, capsys):
    config = GenerateConfig(checkpoint=str(run_folder), prompts=("def",), max_new_tokens=6)
    (whole,) = generate(config)
    print_generations(config)
    assert capsys.readouterr().out == "def" + whole.text + "\n"


@pytest.mark.parametrize("batch_size", [1, 16])
def test_several_texts_are_printed_in_order(run_folder, batch_size, capsys):
    asked = {"temperature": 1.0, "num_samples": 2, "max_new_tokens": 6, "batch_size": batch_size}
    config = GenerateConfig(checkpoint=str(run_folder), prompts=("a", "bcd"), **asked)
    texts = [one.text for one in generate(config)]
    print_generations(config)
    heads = [f"--- prompt {prompt}, sample {sample}\n" for prompt in (1, 2) for sample in (1, 2)]
    blocks = zip(heads, ("a", "a", "bcd", "bcd"), texts, strict=True)
    assert capsys.readouterr().out == "\n".join(f"{head}{prompt}{text}\n" for head, prompt, text in blocks)


def test_prompts_of_the_command_line_and_of_a_file_give_a_line_of_json_each(run_folder, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "two\\nlines"}\n\n{"prompt": "three", "id": 3}\n')
    asked = ["generate", str(run_folder), "--prompt", "one", "--prompts", str(file), "--max-new-tokens", "2"]
    assert main([*asked, "--json", "--stop", "\N{SNOWMAN}"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "two\nlines", "three"]
    assert [(line["sample"], line["ended_by"], len(line["ids"])) for line in lines] == [(0, "length", 2)] * 3


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
