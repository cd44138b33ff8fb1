"""The process that renders chat templates: a template is a program, and so it has its time and its memory.

Jinja's sandbox keeps a template from files and processes, not from `{% for %}` in `{% for %}`, or `'a' * 10**9`. What
the kernel bounds, of a process that does nothing else, is bounded whatever the template does: CPU time, so that a busy
machine accuses no template, and memory.

Requests come one by one on standard input: JSON, seconds and bytes. An answer is its kind and, where that is RENDERED,
the text of the first rendering, in UTF-8 that may hold the unpaired surrogates of marks, and of the others in JSON how
many of its characters each is. They are a conversation's beginnings, two for each turn: together many times its size.
"""

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fanformer.processes import end_with_parent, read_message, write_message

if TYPE_CHECKING:
    import jinja2

RENDERED, REFUSED, TOO_LARGE = b"rendered", b"refused", b"too large"
# Limits of one request; the CPU time grows with its input. The largest conversations known to us take
# hundredths of a second, and some ten times their size.
CPU_SECONDS = 20
CPU_BYTES_PER_SECOND = 1 << 20
MEMORY_BYTES = 1 << 28
MEMORY_PER_INPUT_BYTE = 64
# Unpaired surrogates: no text that can be written as UTF-8, and so no message, contains one.
BEGIN, END = "\ud800", "\udfff"


def compiled(source: str) -> "jinja2.Template":
    """Return a template in the environment that transformers gives them, except for the time of day.

    Without `strftime_now` the same conversations give the same text on every day.

    Raises:
        ValueError: it is not valid Jinja; says in which line.
    """
    # Imported here: the parent wants the numbers above alone.
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import CallBlock, Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}`: its text between the marks."""

        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = tojson
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply for Jinja") from error


def cpu_seconds(request_bytes: int) -> int:
    """Return the CPU time that a request of that size may take."""
    return CPU_SECONDS + request_bytes // CPU_BYTES_PER_SECOND


def memory_bytes(request_bytes: int) -> int:
    """Return the memory that a request of that size may take."""
    return MEMORY_BYTES + MEMORY_PER_INPUT_BYTE * request_bytes


def main() -> None:
    """Answer requests until there are no more."""
    end_with_parent()
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    templates: dict[str, jinja2.Template] = {}
    compiled("")  # imports what there is to import before memory is bounded
    own_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    while request := read_message(requests):
        content, seconds, most_bytes = request
        _bound(resource.RLIMIT_AS, own_bytes + int(most_bytes))
        used = resource.getrusage(resource.RUSAGE_SELF)
        _bound(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + int(seconds))
        try:
            text, lengths = _rendered(templates, **json.loads(content))
            answer = [RENDERED, text.encode("utf-8", "surrogatepass"), json.dumps(lengths).encode()]
        except MemoryError:
            templates.clear()
            answer = [TOO_LARGE]
        except Exception as error:  # a template may fail in any way
            reason = " ".join(str(error).split()) or type(error).__name__
            answer = [REFUSED, reason[:1000].encode("utf-8", "backslashreplace")]
        write_message(answers, *answer)


def _rendered(
    templates: "dict[str, jinja2.Template]",
    source: str,
    variables: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    renderings: Sequence[tuple[int, bool]],
    tools: Sequence[Mapping[str, Any]] | None,
) -> tuple[str, list[int | None]]:
    """Return the first rendering, and the length of each other one; None where the first does not begin with it."""
    if source not in templates:
        templates[source] = compiled(source)
    texts = (
        templates[source].render(messages=messages[:count], add_generation_prompt=opens, tools=tools, **variables)
        for count, opens in renderings
    )
    whole = next(texts, "")
    return whole, [len(text) if whole.startswith(text) else None for text in texts]


def _bound(which: int, soft: int) -> None:
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


if __name__ == "__main__":
    main()
