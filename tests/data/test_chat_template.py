"""Conversations rendered and encoded: learned tokens are the learned texts; prompts are as in training."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_fanformer.data.chat_template import (
    BEGINS_OTHERWISE,
    OLMO,
    OLMO_TEMPLATE,
    REFUSED,
    ChatTemplate,
    TemplateRefusal,
    encode_chat,
    find_template,
    refuse_space_before_texts,
)
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.errors import InputError
from megatron_fanformer.prepare.chats import Chat, ChatParser
from tests.data.chat_making import CHATML, made_up_chats

CHATS = made_up_chats(40)
HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.fixture(params=["tokenizer.json", "sentencepiece"])
def tokenizer_file(request: pytest.FixtureRequest, olmo_tokenizer_file: Path, small_tokenizer_file: Path) -> Path:
    return olmo_tokenizer_file if request.param == "tokenizer.json" else small_tokenizer_file


def test_a_prompt_has_the_ids_that_come_before_the_answer_in_training(tokenizer_file: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_file)
    for template in (ChatTemplate(OLMO_TEMPLATE, {"eos_token": "<|endoftext|>"}), ChatTemplate(CHATML)):
        for messages in CHATS:
            ids = encode_chat(tokenizer, template.render(messages))[0].tolist()
            last = max(number for number, message in enumerate(messages) if message["role"] == "assistant")
            prompt = encode_chat(tokenizer, template.render(messages[:last], add_generation_prompt=True))[0].tolist()
            assert ids[: len(prompt)] == prompt


def test_white_space_after_a_turn_is_learned_where_nothing_else_ends_it() -> None:
    turns = "{% for m in messages %}{{ m.content }}" + "ENDS" + "\n{% endfor %}"
    for end, learned in (("", "Hello\n"), ("<end>", "Hello<end>")):
        chat = ChatTemplate(turns.replace("ENDS", end)).render(HELLO)
        assert [chat.text[begin:stop] for begin, stop in chat.learned] == [learned]


# -- with tools

ARGUMENTS = {"city": "Köln", "days": 2}
CALLS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{% set f = call.function %}{{ f.name }}(WRITTEN){% endfor %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def calling(arguments: object) -> list[dict[str, object]]:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("written", "stated", "expected"),
    [
        ("{{ f.arguments | tojson }}", ARGUMENTS, '{"city": "Köln", "days": 2}'),
        ("{{ f.arguments | tojson }}", json.dumps(ARGUMENTS), '{"city": "Köln", "days": 2}'),
        ("{{ f.arguments }}", '{"city":"Köln"}', '{"city":"Köln"}'),
        (
            "{% for n, v in f.arguments.items() %}{{ n }}={{ v }};{% endfor %}",
            json.dumps(ARGUMENTS),
            "city=Köln;days=2;",
        ),
        ("{{ f.arguments | tojson }}", "no object", '"no object"'),
    ],
)
def test_arguments_are_written_as_the_template_takes_them(written: str, stated: object, expected: str) -> None:
    chat = ChatTemplate(CALLS.replace("WRITTEN", written)).render(calling(stated))
    assert chat.text == f"<user>Rain?\n<assistant>weather({expected})\n"
    assert [chat.text[begin:end] for begin, end in chat.learned] == [f"weather({expected})"]


# -- refused


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        # Earlier answers are shortened once others follow, as templates do that leave out earlier reasoning.
        ("{% for m in messages %}{{ m.content[: 9 if loop.last else 2] }}\n{% endfor %}", BEGINS_OTHERWISE),
        ("{{ raise_exception('roles must alternate') }}", REFUSED),
        ("{{ ''.__class__.__mro__ }}", REFUSED),
        ("{{ 'a' * 10 ** 20 }}", REFUSED),
        (
            "{% macro turn(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
            "{% for m in messages %}{{ turn(m) + turn(m) }}{% endfor %}",
            REFUSED,
        ),
        ("{{ '\\ud900' }}", REFUSED),
    ],
)
def test_what_a_template_cannot_render_is_refused_with_its_reason(source: str, reason: str) -> None:
    with pytest.raises(TemplateRefusal) as refusal:
        ChatTemplate(source).render([*HELLO, *HELLO])
    assert refusal.value.reason == reason
    assert "\n" not in str(refusal.value)


def test_a_prompt_needs_no_learned_spans_and_has_those_that_are_known() -> None:
    """A template that leaves out the reasoning of earlier answers, as Qwen3's."""
    source = (
        "{% for m in messages %}<{{ m.role }}>"
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = [*HELLO, HELLO[0], {"role": "assistant", "content": "hm</think>Hello"}, HELLO[0]]
    prompt = ChatTemplate(source).render(messages, add_generation_prompt=True, needs_learned=False)
    answer = "<user>Hi<end>\n<assistant>Hello<end>\n"
    assert prompt.text == 2 * answer + "<user>Hi<end>\n<assistant>"
    assert [prompt.text[begin:end] for begin, end in prompt.learned] == ["Hello<end>"]
    with pytest.raises(TemplateRefusal, match="renders the messages before message 3 "):
        ChatTemplate(source).render(messages, add_generation_prompt=True)


def test_a_tokenizer_that_puts_a_space_before_a_text_is_refused(tmp_path: Path, olmo_tokenizer_file: Path) -> None:
    letters = {"a": 0, "b": 1, "Ġ": 2, "<|endoftext|>": 3}
    library = Library(models.BPE(letters, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="puts a space before every text"):
        refuse_space_before_texts(load_tokenizer(tmp_path, eod_id=3))
    refuse_space_before_texts(load_tokenizer(olmo_tokenizer_file))


# -- found


@pytest.fixture
def folder(tmp_path: Path, small_tokenizer_file: Path) -> Path:
    (tmp_path / "tokenizer.model").write_bytes(small_tokenizer_file.read_bytes())
    return tmp_path


def test_a_tokenizers_own_template_is_found_beside_it(folder: Path) -> None:
    with pytest.raises(InputError, match=r"has no chat template.*olmo"):
        find_template(folder)
    config = {"eos_token": {"content": "<end>"}, "chat_template": "config{{ eos_token }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert rendered_prompt(find_template(folder / "tokenizer.model")) == "config<end>"
    assert rendered_prompt(find_template(folder, eod_id=0)) == "config<unk>"
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "by name"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert rendered_prompt(find_template(folder)) == "by name"
    (folder / "chat_template.jinja").write_text("file{{ eos_token }}")
    assert rendered_prompt(find_template(folder)) == "file<|endoftext|>"
    assert rendered_prompt(find_template(folder, eod_id=0)) == "file<unk>"


def rendered_prompt(template: ChatTemplate) -> str:
    return template.render(HELLO[:1]).text


def test_a_template_may_be_named(folder: Path) -> None:
    (folder / "broken.jinja").write_text("{{ x }}\n{% for m in messages %}")
    with pytest.raises(InputError, match=r"not valid Jinja, line 2: [^\n]*endfor[^\n]*$"):
        find_template(folder, folder / "broken.jinja")
    (folder / "other.jinja").write_text("other")
    assert rendered_prompt(find_template(folder, folder / "other.jinja")) == "other"
    olmo = find_template(folder, OLMO).render(HELLO)
    assert olmo.text == "<|endoftext|><|user|>\nHi\n<|assistant|>\nHello<|endoftext|>\n"
    with pytest.raises(InputError, match=r"none\.jinja cannot be read"):
        find_template(folder, folder / "none.jinja")


@pytest.mark.parametrize("token", ["<|🙂|>", "<｜end▁of▁sentence｜>", "\"'\\n\n\u0041{{ x }}{% y %}"])
def test_special_tokens_are_set_as_they_are(token: str) -> None:
    template = ChatTemplate("{{ bos_token + messages[0]['content'] }}", {"bos_token": token})
    assert rendered_prompt(ChatTemplate(template.standalone_source())) == rendered_prompt(template) == token + "Hi"


# -- as transformers' apply_chat_template has it

TURNS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n{% generation %}ANSWER"
    "{% for call in m.tool_calls or [] %}[{{ call.function | tojson }}]{% endfor %}<|end|>{% endgeneration %}"
    "{{ '\n' }}{% else %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
)
CONTENT, OPENING = "{{ m.content }}", "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
KINDS = {
    "a content as it is": TURNS,
    "a content's parts": TURNS.replace(
        "ANSWER",
        "{% if m.content is string %}ANSWER{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}",
    ),
    "reasoning": TURNS.replace("ANSWER", "{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}ANSWER"),
    "names": TURNS.replace("<|{{ m.role }}|>", "<|{{ m.role }} {{ m.name }}|>"),
    "the first message": "{% if messages[0].role == 'system' %}!{% endif %}" + TURNS,
    "the date, and tools": "{{ strftime_now('%Y') }}{% if tools is not none %}{{ tools | tojson }}{% endif %}" + TURNS,
}
KINDS = {name: source.replace("ANSWER", CONTENT) + OPENING for name, source in KINDS.items()}
SPECIAL = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
ASKED, SYSTEM = {"role": "user", "content": "Rain in Köln?", "name": "Ann"}, {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city."}}
DRY = {"role": "assistant", "content": "Dry.\nYes", "reasoning_content": "A fact."}
CALLED = [
    ASKED,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "dry", "name": "weather", "tool_call_id": "c1"},
    DRY,
]
COMPARED: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    *(([*before, *HELLO, *more], None) for before in ([], [SYSTEM]) for more in ([], [ASKED, DRY])),
    *(([*before, HELLO[1], ASKED, DRY], None) for before in ([], [SYSTEM])),
    (CALLED, [TOOL]),
    ([*CALLED, *HELLO], []),
    ([{**ASKED, "content": "  a \n"}, {**DRY, "content": " b\n\n", "thinking": None}], None),
]


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token is a byte, so that each character of a mask is seen."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE({byte: id for id, byte in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens(list(SPECIAL.values()))
    library.save(str(file := tmp_path_factory.mktemp("bytes") / "tokenizer.json"))
    return file


def prepared(
    source: str, tokenizer: Path, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> tuple[list[int], list[int]]:
    """Ids and mask as `prepare --chat` has them of a line."""
    chat = ChatParser().parse(json.dumps({"messages": messages, "tools": tools}).encode())
    assert isinstance(chat, Chat)
    rendered = ChatTemplate(source, SPECIAL).render(chat.messages, tools=chat.tools)
    ids, learned = encode_chat(load_tokenizer(tokenizer), rendered)
    return ids.tolist(), learned.astype(int).tolist()


def applied(
    source: str, tokenizer: Path, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> tuple[list[int], list[int]]:
    """The same by transformers; without marks it learns nothing."""
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), **SPECIAL)
    found = theirs.apply_chat_template(
        messages, tools=tools, chat_template=source, return_assistant_tokens_mask=True, return_dict=True
    )
    return found["input_ids"], found["assistant_masks"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_learned_is_what_transformers_marks(kind: str, byte_tokenizer: Path) -> None:
    """Also without the marks, where it is found by the renderings of whole turns."""
    source = KINDS[kind]
    for messages, tools in COMPARED:
        expected = applied(source, byte_tokenizer, messages, tools)
        assert prepared(source, byte_tokenizer, messages, tools) == expected
        bare = source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
        assert bare != source and prepared(bare, byte_tokenizer, messages, tools) == expected, messages


@pytest.mark.parametrize("end", ["<|end|>", ""])
def test_the_end_of_a_turn_is_what_a_template_writes_behind_an_answer(end: str) -> None:
    source = KINDS["a content as it is"].replace("<|end|>", end)
    for one in (source, source.replace("{% generation %}", "").replace("{% endgeneration %}", "")):
        assert ChatTemplate(one, SPECIAL).end_of_turn().strip() == end
    assert ChatTemplate("{{ raise_exception('never') }}").end_of_turn() == ""
