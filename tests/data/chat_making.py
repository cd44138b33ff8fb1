"""Made-up conversations, and a template."""

import random

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
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
