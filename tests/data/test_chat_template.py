"""Conversations rendered and encoded: what is learned equals a count by bytes; prompts are as in training."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from megatron_fanformer.data import chat_renderer, chat_template
from megatron_fanformer.data.chat_template import (
    BEGINS_OTHERWISE,
    OLMO,
    OLMO_TEMPLATE,
    REFUSED,
    ChatTemplate,
    TemplateRefusal,
    TemplateTooLarge,
    encode_chat,
    find_template,
    refuse_spaces_between,
)
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.errors import FanformerError, InputError
from tests.data.chat_making import (
    CHATML,
    CHATML_MARKED,
    Messages,
    bytes_by_id,
    counted_mask,
    learned_bytes,
    made_up_chats,
    parts_in_chatml,
    parts_in_olmo_form,
)

CHATS = made_up_chats(1000)
HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
Parts = Callable[[Messages], list[tuple[str, bool]]]


@pytest.fixture(params=["tokenizer.json", "sentencepiece"])
def tokenizer_file(request: pytest.FixtureRequest, olmo_tokenizer_file: Path, small_tokenizer_file: Path) -> Path:
    return olmo_tokenizer_file if request.param == "tokenizer.json" else small_tokenizer_file


@pytest.mark.parametrize(
    ("source", "parts", "count"),
    [
        pytest.param(source, parts, count, id=f"{name} {count}", marks=marks)
        for count, marks in ((150, ()), (1000, pytest.mark.full))
        for source, parts, name in (
            (OLMO_TEMPLATE, parts_in_olmo_form, "olmo"),
            (CHATML, parts_in_chatml, "by prefixes"),
            (CHATML_MARKED, parts_in_chatml, "by generation blocks"),
        )
    ],
)
def test_what_is_learned_equals_a_count_by_the_bytes_of_tokens(
    tokenizer_file: Path, source: str, parts: Parts, count: int
) -> None:
    tokenizer = load_tokenizer(tokenizer_file)
    template = ChatTemplate(source, {"eos_token": "<|endoftext|>"})
    pieces = bytes_by_id(tokenizer_file)
    for messages in CHATS[:count]:
        ids, learned = encode_chat(tokenizer, template.render(messages))
        expected = learned_bytes(parts(messages), is_normalised=tokenizer_file.suffix == ".json")
        assert learned.tolist() == counted_mask(ids.tolist(), pieces, *expected), messages


def test_offsets_of_the_whole_text_give_the_same_mask(olmo_tokenizer_file: Path) -> None:
    """By the library's own offsets, wherever the cuts change no id: of all conversations but a few."""
    tokenizer, library = load_tokenizer(olmo_tokenizer_file), Library.from_file(str(olmo_tokenizer_file))
    template = ChatTemplate(OLMO_TEMPLATE, {"eos_token": "<|endoftext|>"})
    compared = 0
    for messages in CHATS[:100]:
        parts = parts_in_olmo_form(messages)
        learned_characters = [flag for text, flag in parts for _ in text]
        whole = library.encode("".join(text for text, _ in parts), add_special_tokens=False)
        ids, learned = encode_chat(tokenizer, template.render(messages))
        if ids.tolist() == whole.ids:
            assert learned.tolist() == [learned_characters[begin] for begin, _ in whole.offsets]
            compared += 1
    assert compared > 95


def test_a_prompt_has_the_ids_that_come_before_the_answer_in_training(tokenizer_file: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_file)
    for template in (ChatTemplate(OLMO_TEMPLATE, {"eos_token": "<|endoftext|>"}), ChatTemplate(CHATML)):
        for messages in CHATS[:40]:
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


def test_tools_are_rendered_as_by_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = "{% if tools is not none %}{{ tools | tojson }}\n{% endif %}" + CALLS.replace(
        "WRITTEN", "{{ f.arguments }}"
    )
    tools = [{"type": "function", "function": {"name": "weather", "description": "Of a 'city'."}}]
    messages = [*calling(ARGUMENTS), {"role": "tool", "content": "dry", "name": "weather"}]
    for given in (tools, None):
        [expected], _ = render_jinja_template([messages], chat_template=source, tools=given)
        assert ChatTemplate(source).render(messages, tools=given).text == expected


@pytest.mark.parametrize(
    ("messages", "tools", "what"),
    [
        (calling(ARGUMENTS), None, "tool calls"),
        ([*HELLO, {"role": "tool", "content": "dry"}], None, "a tool message"),
        ([{"role": "developer", "content": "Brief."}, *HELLO], None, "a developer message"),
        (HELLO, [{"name": "weather"}], "tools"),
    ],
)
def test_what_a_template_leaves_out_is_refused(messages: Messages, tools: object, what: str) -> None:
    source = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(TemplateRefusal, match=f"leaves out {what}; use one that knows") as refusal:
        ChatTemplate(source).render(messages, tools=tools)
    assert refusal.value.reason == f"the template leaves out {what}"


# -- refused


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        # Earlier answers are shortened once others follow, as templates do that leave out earlier reasoning.
        ("{% for m in messages %}{{ m.content[: 9 if loop.last else 2] }}\n{% endfor %}", BEGINS_OTHERWISE),
        ("{{ raise_exception('roles must alternate') }}", REFUSED),
        ("{{ messages[9].content }}", REFUSED),
        ("{{ messages.append(1) }}", REFUSED),
        ("{{ ''.__class__.__mro__ }}", REFUSED),
        ("{{ strftime_now('%Y') }}", REFUSED),
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


def test_a_template_that_is_not_jinja_is_one_line() -> None:
    with pytest.raises(InputError, match=r"not valid Jinja, line 2: .*endfor") as error:
        ChatTemplate("{{ x }}\n{% for m in messages %}")
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_puts_a_space_before_a_text_is_refused(tmp_path: Path, olmo_tokenizer_file: Path) -> None:
    letters = {"a": 0, "b": 1, "Ġ": 2, "<|endoftext|>": 3}
    library = Library(models.BPE(letters, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="puts a space before every text"):
        refuse_spaces_between(load_tokenizer(tmp_path, eod_id=3))
    refuse_spaces_between(load_tokenizer(olmo_tokenizer_file))


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
    (folder / "other.jinja").write_text("other")
    assert rendered_prompt(find_template(folder, folder / "other.jinja")) == "other"
    olmo = find_template(folder, OLMO).render(HELLO)
    assert olmo.text == "<|endoftext|><|user|>\nHi\n<|assistant|>\nHello<|endoftext|>\n"
    with pytest.raises(InputError, match=r"none\.jinja cannot be read"):
        find_template(folder, folder / "none.jinja")


@pytest.mark.parametrize("token", ["<|🙂|>", "<｜end▁of▁sentence｜>", "\"'\\n\n\u0041{{ x }}{% y %}"])
def test_special_tokens_are_set_as_they_are(token: str) -> None:
    template = ChatTemplate("{{ bos_token + messages[0]['content'] }}", {"bos_token": token})
    assert rendered_prompt(ChatTemplate(template.with_variables())) == rendered_prompt(template) == token + "Hi"


INDENTED = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
{%- endif %}
    {% for message in messages %}
        {% if message['role'] == 'user' %}
  <u> {{ message['content'] | trim }}
        {% elif message['role'] == 'assistant' %}
\t<a>
{{ message['content'] }}</a>
        {% endif %}
    {% endfor %}
    {% if add_generation_prompt %}
\t<a>
    {% endif %}
"""


@pytest.mark.parametrize("opens_an_answer", [False, True])
def test_indented_blocks_are_rendered_as_by_transformers(opens_an_answer: bool) -> None:
    """Which takes out a block's line, its indentation and its end, and leaves those of text."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "system", "content": " be brief"}, *HELLO, *HELLO]
    [expected], _ = render_jinja_template([messages], chat_template=INDENTED, add_generation_prompt=opens_an_answer)
    assert ChatTemplate(INDENTED, {}).render(messages, opens_an_answer).text == expected
    assert expected.count("\n") > 4 and "  <u> Hi\n" in expected


# -- what a template may take


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "1 s of CPU time"),
        ("{{ 'a' * 1000000000 }}", "256 MiB of memory"),  # folded by Jinja when it compiles
        ("{% set a = namespace(b='a') %}{% for c in range(40) %}{% set a.b = a.b + a.b %}{% endfor %}", "256 MiB"),
        ("{{ 'a'.ljust(messages[0].content | length * 10 ** 9) }}", "256 MiB"),
        ("{{ '{:>2000000000}'.format(messages[0].content) }}", "256 MiB"),
    ],
)
def test_a_template_without_end_is_an_error(template: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one is rendered."""
    monkeypatch.setattr(chat_renderer, "CPU_SECONDS", 1)
    with pytest.raises(TemplateTooLarge, match=f"the chat template takes more than {what}"):
        ChatTemplate(template).render(HELLO)
    assert ChatTemplate("{{ messages[0].content }}").render(HELLO).text == HELLO[0]["content"]


def test_a_long_conversation_is_rendered_in_the_memory_of_a_template() -> None:
    """Of a hundred turns: the renderings of its beginnings have a hundred times its size together."""
    question, answer = "🙂" + "q" * 3000, "a" * 7000
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    chat = ChatTemplate(CHATML).render(turns * 100)
    assert len(chat.learned) == 100
    assert {chat.text[begin:end] for begin, end in chat.learned} == {f"{answer}<|im_end|>"}


def test_a_process_that_is_killed_is_another_error_than_the_templates() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    (renderer,) = chat_template._renderers
    renderer._process.kill()
    with pytest.raises(FanformerError, match=r"the process that renders chat templates ended with exit code -9"):
        template.render(HELLO)
    assert template.render(HELLO).text == HELLO[0]["content"]
