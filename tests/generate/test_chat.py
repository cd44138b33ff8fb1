"""The verb `chat`: answers as transformers gives them, the cache from turn to turn, and what is typed and piped."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_fanformer.cli import main
from megatron_fanformer.errors import InputError
from megatron_fanformer.generate import chat as chat_module
from megatron_fanformer.generate.chat import open_chat
from megatron_fanformer.generate.models import Decoder
from megatron_fanformer.generate.verb import ChatConfig
from tests.generate.making import write_export

TEMPLATE = """\
{% for message in messages %}
{{ message.role[0] + ':' }}
{%- if message.role == 'assistant' %}
{% generation %}{{ message.content + eos_token }}{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}|
{%- endfor %}
{%- if add_generation_prompt %}a:{% endif %}
"""
SYSTEM = "be brief"
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def exported_chat(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> Path:
    folder = tmp_path_factory.mktemp("chats") / "model"
    write_export(folder, "fanformer-tied", tokenizer_file, TEMPLATE)
    return folder


def asked(folder: Path, **settings) -> ChatConfig:
    return ChatConfig(**{"checkpoint": str(folder), "max_new_tokens": NEW_TOKENS, **settings})


def transformers_answers(folder: Path, messages: list[dict[str, str]], *texts: str) -> list[str]:
    """Greedy, through `apply_chat_template`; the messages are added to."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    answers = []
    for text in texts:
        messages.append({"role": "user", "content": text})
        inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[0, inputs.input_ids.shape[1] :]
        answers.append("".join(chr(token) for token in ids.tolist() if token))  # a character's id is its code point
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_the_answers_are_those_of_transformers_and_each_token_is_read_once(exported_chat, monkeypatch):
    texts, read = ("hello", "and x?", "so"), []
    next_logits = Decoder.next_logits

    def counted(decoder: Decoder, ids_bs: torch.Tensor) -> torch.Tensor:
        read.append(ids_bs.shape[1])
        return next_logits(decoder, ids_bs)

    expected = transformers_answers(exported_chat, [{"role": "system", "content": SYSTEM}], *texts)
    (other,) = transformers_answers(exported_chat, [{"role": "system", "content": SYSTEM}], texts[1])
    assert other != expected[1]
    monkeypatch.setattr(Decoder, "next_logits", counted)
    with open_chat(asked(exported_chat, system=SYSTEM)) as chat:
        pieces = [list(chat.answer(text)) for text in texts]
        assert ["".join(of_one) for of_one in pieces] == expected
        assert all(len([piece for piece in of_one if piece]) > NEW_TOKENS // 2 for of_one in pieces)
        turns = zip(texts, expected, strict=True)
        whole = len(f"s:{SYSTEM}|") + sum(len(f"u:{text}|a:{answer}|") for text, answer in turns)
        ends = len(texts) - 1  # of text, of the answers that were read on from
        # neither the last answer's last token was read, nor the separator behind it
        assert sum(read) == whole + ends - 2
        chat.reset()
        assert "".join(chat.answer(texts[1])) == other, "what the cache holds of another beginning is not read"


def test_the_oldest_turns_leave_a_full_context_and_the_system_stays(exported_chat):
    """128 tokens: three turns of 40 do not fit, with an answer of 8."""
    texts = ["a" * 26, "b" * 26, "c" * 26]
    with open_chat(asked(exported_chat, system=SYSTEM)) as chat:
        answers = ["".join(chat.answer(text)) for text in texts]
        assert chat.num_dropped_turns == 1
        contents = [message["content"] for message in chat._messages]
        assert contents == [SYSTEM, texts[1], answers[1], texts[2], answers[2]]
        with pytest.raises(InputError, match=r"makes 1[0-9]{2} tokens .* trained on 128; write a shorter one"):
            list(chat.answer("d" * 150))
        assert [message["content"] for message in chat._messages] == contents
        chat.reset()
        assert (chat.num_dropped_turns, [message["content"] for message in chat._messages]) == (0, [SYSTEM])


def test_an_answer_that_is_broken_off_stays_as_far_as_it_came(exported_chat):
    with open_chat(asked(exported_chat)) as chat:
        pieces = chat.answer("hello")
        begun = next(pieces) + next(pieces)
        pieces.close()
        assert chat._messages[-1] == {"role": "assistant", "content": begun}


def test_a_pipe_gets_the_answers_alone(exported_chat, monkeypatch, capsys):
    first, second = transformers_answers(exported_chat, [], "hello", "and x?")
    sent = b"hello\r\n \nand x?\n/reset\nhello\n/quit\nnever read\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(sent)))
    capsys.readouterr()
    assert main(["chat", str(exported_chat), "--max-new-tokens", str(NEW_TOKENS)]) == 0
    assert capsys.readouterr() == (f"{first}\n{second}\n{first}\n", "")


@pytest.mark.parametrize(
    ("sent", "arguments", "shown"),
    [
        (b"a\n\xff\n", ["--max-new-tokens", "2"], "line 2 of the messages is not valid UTF-8; write them in that"),
        (b"x" * 200, [], "line 1 of the messages: the message makes"),
        (b"", ["--max-new-tokens", "128"], "max_new_tokens is 128, which leaves no room for a message in the 128"),
        (b"", ["--temperature", "-1"], "temperature is -1.0; it must be finite"),
        (b"", ["--chat-template", "no.jinja"], "no.jinja cannot be read"),
    ],
)
def test_what_cannot_be_answered_is_one_line(exported_chat, monkeypatch, capsys, sent, arguments, shown):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(sent)))
    assert main(["chat", str(exported_chat), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert shown in line


class Interrupted:
    """Stands in for a conversation in whose answers Ctrl-C comes after the first piece."""

    num_dropped_turns = 0

    @staticmethod
    def answer(_text: str) -> Iterator[str]:
        yield "."
        raise KeyboardInterrupt


def test_ctrl_c_ends_an_answer_and_twice_the_program(monkeypatch, capsys):
    def talk(*lines: str | None) -> None:
        typed = iter(lines)

        def next_line(_prompt: str) -> str:
            if (line := next(typed)) is None:
                raise KeyboardInterrupt
            return line

        monkeypatch.setattr("builtins.input", next_line)
        chat_module._talk_in_terminal(Interrupted())

    with pytest.raises(KeyboardInterrupt):  # the one that ended the answer, and one at the prompt
        talk("one", None)
    talk("one", "", None, "two", "/quit")
    assert capsys.readouterr().out.splitlines() == [".", ".", "", "."]
