"""Conversations to token files: each line accounted for, cut or dropped, in both forms, as OLMo's script has them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer as Library

from megatron_fanformer.data.chat_template import OLMO_TEMPLATE, ChatTemplate, encode_chat
from megatron_fanformer.data.chats import open_chats
from megatron_fanformer.data.manifest import ChatSettings, Settings
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.errors import InputError
from megatron_fanformer.prepare import chats, documents
from megatron_fanformer.prepare.chats import MARKS_OTHERS, NOTHING_LEARNED, Chat, ChatEncoder, ChatParser
from megatron_fanformer.prepare.documents import DocumentFile, Refusal, parse_block
from megatron_fanformer.prepare.encoding import choose_encoder
from tests.data.chat_making import Messages, made_up_chats
from tests.prepare.making import Prepare, WriteLines, prepare_files

USER, ANSWER = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
OLMO: dict[str, Any] = {"chat": True, "chat_template": "olmo"}
PADDING, END = 1, 50279


def as_lines(conversations: list[Messages]) -> list[bytes]:
    """In each of the three forms by turns, as far as it can be said in it."""
    lines = []
    for number, messages in enumerate(conversations):
        senders = {"user": "human", "assistant": "gpt", "system": "system"}
        forms: list[dict[str, Any]] = [
            {"id": str(number), "messages": messages},
            {"conversations": [{"from": senders[m["role"]], "value": m["content"]} for m in messages]},
            {"prompt": messages[:-1], "completion": messages[-1:], "source": "made up"},
        ]
        lines.append(json.dumps(forms[number % 3]).encode())
    return lines


# -- parsed


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER, ANSWER], "score": 1.5},
        {"conversations": [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]},
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"messages": None, "conversations": [USER, ANSWER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "1+"}, {"text": "1="}]}, ANSWER]},
        {"messages": [USER, {**ANSWER, "tool_calls": None}], "tools": ""},
    ],
)
def test_each_form_gives_the_same_messages(fields: dict[str, Any]) -> None:
    assert ChatParser().parse(json.dumps({**fields, "id": 7}).encode()) == Chat([USER, ANSWER], "7", None)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", documents.NOT_JSON),
        (b"[1]", documents.NOT_AN_OBJECT),
        (b" ", documents.EMPTY_LINE),
        (b'{"messages": [{"role": "assistant", "content": "\xff"}]}', documents.INVALID_UTF8),
        (b'{"messages": [{"role": "assistant", "content": "\\ud800"}]}', documents.UNPAIRED_SURROGATE),
        (b'{"messages": "' + b"x" * (8 << 20) + b'"}', "above 8 MiB"),
        (b'{"text": "a document", "prompt": "without completion"}', chats.NO_MESSAGES_FIELD),
        (b'{"messages": "text"}', chats.NOT_MESSAGES),
        (b'{"messages": ["text"]}', chats.NOT_MESSAGES),
        (b'{"messages": [{"content": "nobody\'s"}]}', chats.NOT_MESSAGES),
        (b'{"messages": []}', chats.NO_ASSISTANT_TURN),
        (b'{"messages": [{"role": "assistant", "content": null}]}', chats.CONTENT_NOT_TEXT),
        (b'{"messages": [{"role": "assistant", "content": {"a": 1}}]}', chats.CONTENT_NOT_TEXT),
        (b'{"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}', chats.CONTENT_NOT_TEXT),
        (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', chats.CONTENT_NOT_TEXT),
        (b'{"messages": [{"role": "user", "content": "", "tool_calls": [{"name": "f"}]}]}', chats.TOOL_CALLS),
        (b'{"messages": [{"role": "assistant", "content": "", "tool_calls": "f()"}]}', chats.TOOL_CALLS),
        (b'{"messages": [{"role": "assistant", "tool_calls": [{"name": "\\ud800"}]}]}', documents.UNPAIRED_SURROGATE),
        (b'{"messages": [{"role": "assistant", "content": ""}], "tools": [{"type": "function"}]}', chats.TOOLS),
        (b'{"messages": [{"role": "assistant", "content": ""}], "tools": "none"}', chats.TOOLS),
        (b'{"prompt": "x", "completion": [1]}', chats.CONTENT_NOT_TEXT),
        (b'{"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}', chats.NOT_A_WEIGHT),
        (b'{"messages": [{"role": "narrator", "content": ""}]}', chats.UNKNOWN_ROLE),
        (b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}', chats.TOOL_CALLS),
        (b'{"messages": [{"role": "user", "content": "x"}]}', chats.NO_ASSISTANT_TURN),
    ],
)
def test_a_line_that_is_no_conversation_is_refused_with_its_reason(line: bytes, reason: str) -> None:
    assert ChatParser().parse(line) == Refusal(reason)


def test_rows_of_parquet_are_what_the_same_lines_are(tmp_path: Path, write_lines: WriteLines) -> None:
    """Also where a row has no messages, an unknown role, or fields of tools, which are null."""

    def parsed(path: Path) -> list[Any]:
        blocks = DocumentFile(path, ChatParser().columns).blocks()
        return [entry for block in blocks for entry in parse_block(block, ChatParser())]

    rows = [{"id": str(n), "messages": messages, "other": n} for n, messages in enumerate(made_up_chats(40))]
    rows += [
        {"id": "a", "messages": None, "other": 0},
        {"id": "b", "messages": [{"role": "?", "content": ""}], "other": 0},
    ]
    lines = write_lines("chats.jsonl", (json.dumps(row).encode() for row in rows))
    message = pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string(), "tool_calls": pyarrow.string()})
    kinds = {"other": pyarrow.int64(), "id": pyarrow.string(), "messages": pyarrow.list_(message)}
    parquet.write_table(pyarrow.Table.from_pylist(rows, pyarrow.schema(kinds.items())), tmp_path / "chats.parquet")
    found = parsed(tmp_path / "chats.parquet")
    assert found == parsed(lines) and len(found) == len(rows)
    assert found[-2:] == [Refusal(chats.NO_MESSAGES_FIELD), Refusal(chats.UNKNOWN_ROLE)]


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WITH_TOOLS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": [{"type": "text", "text": "2"}], "tool_call_id": "c1", "name": "add"},
    ANSWER,
]
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_tools_and_fields_stay_as_stated() -> None:
    answer = {**ANSWER, "reasoning_content": "1 and 1", "parts": [None, {"a": None}]}
    sent = {"from": "gpt", "value": "2", "weight": 1}
    line = {"messages": [*WITH_TOOLS[:-1], answer, {**sent, "name": None}], "tools": json.dumps([TOOL])}
    found = ChatParser().parse(json.dumps(line).encode())
    assert isinstance(found, Chat)
    result = {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"}
    assert found.messages == [*WITH_TOOLS[:3], result, answer, {**ANSWER, "weight": 1}]
    assert found.tools == [TOOL]


def test_tools_are_prepared_by_templates_that_know_them(
    tmp_path: Path, write_lines: WriteLines, small_tokenizer_file: Path
) -> None:
    (tmp_path / "tools.jinja").write_text(TOOL_TEMPLATE)
    lines = [
        {"messages": WITH_TOOLS, "tools": [TOOL]},
        {"messages": [USER, ANSWER], "tools": [TOOL]},
        {"messages": [WITH_TOOLS[0], USER, ANSWER]},
        {"messages": WITH_TOOLS[1:3]},
    ]
    file = write_lines("chats.jsonl", (json.dumps(line).encode() for line in lines))
    made = {"chat": True, "chat_template": str(tmp_path / "tools.jinja")}
    prepare_files(str(tmp_path / "chats"), [file], small_tokenizer_file, **made)
    tokenizer, found = load_tokenizer(small_tokenizer_file), open_chats(str(tmp_path / "chats"))
    assert len(found) == 4
    ids, learned = found[0]
    assert tokenizer.decode(ids.tolist()).startswith('<tool>{"type": "function"')
    call = '<call>{"name": "add", "arguments": {"a": 1, "b": null}}<end>'
    assert tokenizer.decode(ids[learned].tolist()) == f"{call}2<end>"


# -- prepared


def in_olmos_form(library: Library, messages: Messages) -> tuple[list[int], list[bool]]:
    """A conversation as OLMo's script writes it, message by message, not yet cut or padded."""
    ids, mask = [END], [False]
    for message in messages:
        header = library.encode(f"<|{message['role']}|>\n", add_special_tokens=False).ids
        learned = message["role"] == "assistant"
        content = message["content"].strip() + ("<|endoftext|>\n" if learned else "\n")
        body = library.encode(content, add_special_tokens=False).ids
        ids += header + body
        mask += [False] * len(header) + [learned] * len(body)
        mask[-1] = False  # the line end
    return ids, mask


def test_the_npy_form_is_what_olmos_script_writes(
    tmp_path: Path, write_lines: WriteLines, olmo_tokenizer_file: Path
) -> None:
    """Rows of 64, so that some are cut, some padded, and some left without anything to learn."""
    # Of an empty question at the very end, one line end follows another: the script encodes each of them alone.
    ends = ((chat, chat[-1]) for chat in made_up_chats(150, seed=3))
    made_up = [chat for chat, end in ends if end["role"] == "assistant" or end["content"].strip()]
    file = write_lines("chats.jsonl", as_lines(made_up))
    config = {**OLMO, "max_tokens": 64}
    report = prepare_files(str(tmp_path / "tulu"), [file], olmo_tokenizer_file, format="npy", **config)
    library = Library.from_file(str(olmo_tokenizer_file))
    rows = [in_olmos_form(library, messages) for messages in made_up]
    kept = [(ids[:64], mask[:64]) for ids, mask in rows if any(mask[:64])]
    expected = [np.pad(ids, (0, 64 - len(ids)), constant_values=PADDING) for ids, _ in kept]
    assert (
        np.fromfile(tmp_path / "tulu" / "input_ids.npy", "<u2").reshape(-1, 64).tolist() == np.array(expected).tolist()
    )
    learned = np.fromfile(tmp_path / "tulu" / "label_mask.npy", bool).reshape(-1, 64)
    assert learned.tolist() == [np.pad(mask, (0, 64 - len(mask))).tolist() for _, mask in kept]
    (output,) = report.manifest.outputs
    assert (output.documents, output.learned_tokens) == (len(kept), learned.sum())
    assert output.cut == sum(len(ids) > 64 and any(mask[:64]) for ids, mask in rows) > 0
    assert report.manifest.refused == {"nothing to learn within max_tokens": len(rows) - len(kept)}
    assert len(rows) > len(kept) > 0
    read = open_chats(str(tmp_path / "tulu"))
    assert [len(read), int(read.lengths.max())] == [len(kept), 64]


def test_the_ledger_accounts_for_every_line(
    tmp_path: Path, write_lines: WriteLines, small_tokenizer_file: Path, prepare: Prepare
) -> None:
    """No conversation may be longer than a sum with its answer, as a question of ten words is."""
    template = ChatTemplate(OLMO_TEMPLATE, {"eos_token": "<|endoftext|>"})
    ids, learned = encode_chat(load_tokenizer(small_tokenizer_file), template.render([USER, ANSWER]))
    whole = len(ids)
    ten = {"role": "user", "content": "one two three four five six seven eight nine ten"}
    conversations: list[Messages] = [[USER, ANSWER], [USER], [ten, ANSWER], [USER, ANSWER, ten, ANSWER], [USER, ANSWER]]
    lines = [*(json.dumps({"messages": chat}).encode() for chat in conversations), b"{"]
    file = write_lines("chats.jsonl", lines)
    for too_long, of_longer in (
        ("drop", ["longer than max_tokens"] * 2),
        ("cut", ["nothing to learn within max_tokens", "cut"]),
    ):
        outcomes = ["whole", chats.NO_ASSISTANT_TURN, *of_longer, "whole", documents.NOT_JSON]
        config = {**OLMO, "max_tokens": whole, "too_long": too_long}
        report = prepare(tmp_path / too_long, file, **config)
        rows = parquet.read_table(tmp_path / f"{too_long}.ledger.parquet").to_pylist()
        assert [row["outcome"] for row in rows] == outcomes
        assert [row["line"] for row in rows] == [1, 2, 3, 4, 5, 6]
        kept = [whole if outcome in ("whole", "cut") else 0 for outcome in outcomes]
        assert [row["length"] for row in rows] == kept
        assert [row["first_token"] for row in rows] == [sum(kept[:n]) for n in range(6)]
        assert [row["learned"] for row in rows] == [learned.sum() if length else 0 for length in kept]
        assert report.manifest.outputs[0].cut == outcomes.count("cut")
        assert f"6 lines read: {kept.count(whole)} conversations, {sum(kept)} tokens" in report.lines()[0]


UNMARKED = OLMO_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration -%}", "")
MARKS_ONCE = UNMARKED.replace("{% for", "{% generation %}x{% endgeneration %}{% for")


@pytest.mark.parametrize("template", [OLMO_TEMPLATE, UNMARKED, MARKS_ONCE])
@pytest.mark.parametrize("learn", ["all", "last"])
def test_an_answer_that_is_not_to_be_learned_is_not(small_tokenizer_file: Path, template: str, learn: str) -> None:
    """Of the first conversation's two answers the first, of the second's the last, of the third the only one."""
    good, bad = {**ANSWER, "content": "Good.", "weight": 1}, {**ANSWER, "content": "Bad."}
    weighed = [
        [USER, {**bad, "weight": 0}, USER, good],
        [USER, good, USER, {**bad, "train": False}],
        [USER, {**bad, "loss": 0.0}],
        [USER, good],
    ]
    block = b"\n".join(json.dumps({"messages": messages}).encode() for messages in weighed)
    made = {"template": template, "template_variables": {"eos_token": "<|endoftext|>"}, "too_long": "cut"}
    settings = ChatSettings(learn=learn, max_tokens=None, pad_id=None, **made)
    tokenizer = load_tokenizer(small_tokenizer_file)
    encoder = ChatEncoder(
        choose_encoder(tokenizer, "sentencepiece", 0), Settings(text_field="", dtype="uint16", chat=settings)
    )
    found = encoder.encode(0, block)
    text = tokenizer.decode(found.tokens[found.mask == 1].tolist())
    refused = [reason for _, reason in found.refusals]
    if template == MARKS_ONCE:  # which answer it marks is unknown
        assert text == "x" and refused[:2] == [MARKS_OTHERS] * 2
    elif learn == "all":
        assert text == "Good." * 3 and refused == [NOTHING_LEARNED]
    else:
        assert text == "Good." * 2 and refused == [NOTHING_LEARNED] * 2


# -- refused


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"chat_template": None}, "has no chat template"),
        ({"max_tokens": 1}, "max_tokens is 1"),
        ({"too_long": "drop"}, "without max_tokens"),
    ],
)
def test_wrong_options_are_one_line_and_leave_nothing(
    tmp_path: Path, write_lines: WriteLines, prepare: Prepare, settings: dict[str, Any], shown: str
) -> None:
    file = write_lines("chats.jsonl", as_lines([[USER, ANSWER]]))
    with pytest.raises(InputError, match=shown) as error:
        prepare(tmp_path / "out" / "x", file, **{**OLMO, **settings})
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
