"""Made-up conversations, and what is learned of them, counted by the bytes of tokens with no code of the package."""

import json
import random
import unicodedata
from itertools import groupby
from pathlib import Path

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The same, with what is learned marked in the template.
CHATML_MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONTENTS = [
    *("", " ", "\n", "\n\nafter line ends\n", "  two spaces  ", "\r\n\tx\r\n"),
    *(">", "|>", "<|im_end|>", "<|endoftext|>", "Größe, naïve, e\u0301 and \u00c5", "日本語テキスト 한국어"),
    *("👨\u200d👩\u200d👧 👍🏽", "\u2581 mark\u2581", "=\u0338 overlay"),
    *("a\u0301\u0323\u0345", "\ufeff\u200b\u2028", "שלום العربية ไทย", "{{ messages }} {% generation %}", "<|user|>\n"),
    *("    def f(x):\n        return [x]\n", "1234567890 3.14159", "word " * 60, "\U0010ffff\x00\x7f"),
]

Messages = list[dict[str, str]]


def made_up_chat(chance: random.Random) -> Messages:
    """One to eight messages: perhaps of the system, then in turns, the last of either side; at least one answer."""

    def content() -> str:
        return "".join(chance.choices(CONTENTS, k=chance.choice((0, 1, 1, 1, 2, 3))))

    messages = [{"role": "system", "content": content()}] if chance.random() < 0.2 else []
    for turn in range(chance.randrange(2, 8)):
        messages.append({"role": ("user", "assistant")[turn % 2], "content": content()})
    return messages


def made_up_chats(count: int, *, seed: int = 0) -> list[Messages]:
    """The same on every call."""
    chance = random.Random(seed)
    return [made_up_chat(chance) for _ in range(count)]


def parts_in_chatml(messages: Messages) -> list[tuple[str, bool]]:
    """The text of CHATML in parts, learned or not, by its definition."""
    parts = []
    for message in messages:
        learned = message["role"] == "assistant"
        parts += [
            (f"<|im_start|>{message['role']}\n", False),
            (f"{message['content']}<|im_end|>", learned),
            ("\n", False),
        ]
    return parts


def parts_in_olmo_form(messages: Messages) -> list[tuple[str, bool]]:
    """As OLMo's script writes a conversation, in parts."""
    parts = [("<|endoftext|>", False)]
    for message in messages:
        parts.append((f"<|{message['role']}|>\n", False))
        content, learned = message["content"].strip(), message["role"] == "assistant"
        parts += [(content + "<|endoftext|>" if learned else content, learned), ("\n", False)]
    return parts


def learned_bytes(parts: list[tuple[str, bool]], *, is_normalised: bool) -> tuple[bytes, list[bool]]:
    """The bytes that the tokens of a conversation stand for, and which of them are learned."""
    data, learned = b"", []
    for flag, run in groupby(parts, key=lambda part: part[1]):
        text = "".join(part for part, _ in run)
        own = (unicodedata.normalize("NFC", text) if is_normalised else text).encode()
        data += own
        learned += [flag] * len(own)
    return data, learned


def bytes_by_id(tokenizer: Path) -> list[bytes]:
    """The bytes of each id, by the vocabulary of a byte-level `tokenizer.json` or a sentencepiece model."""
    if tokenizer.suffix == ".model":
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
        pieces = [model.id_to_piece(id) for id in range(model.vocab_size())]
        return [
            bytes([int(piece[3:5], 16)]) if model.is_byte(id) else piece.replace("\u2581", " ").encode()
            for id, piece in enumerate(pieces)
        ]
    content = json.loads(tokenizer.read_text(encoding="utf-8"))
    # Byte-level tokenizers write a printable byte of Latin-1 as itself, and the others, in order, as U+0100 and on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
    found = {token["id"]: token["content"].encode() for token in content["added_tokens"]}
    for piece, id in content["model"]["vocab"].items():
        if id not in found:
            found[id] = bytes(byte_of[character] for character in piece)
    return [found[id] for id in range(max(found) + 1)]


def counted_mask(ids: list[int], pieces: list[bytes], data: bytes, learned: list[bool]) -> list[bool]:
    """The learned tokens, by the places of their bytes; every token lies on one side."""
    assert b"".join(pieces[id] for id in ids) == data
    mask, position = [], 0
    for id in ids:
        (flag,) = set(learned[position : position + len(pieces[id])])
        mask.append(flag)
        position += len(pieces[id])
    return mask
