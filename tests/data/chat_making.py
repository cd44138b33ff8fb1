"""Made-up conversations, and their texts in parts, learned or not, by the definitions of two forms."""

import random

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
