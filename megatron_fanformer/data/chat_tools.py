"""Tools in conversations: what a template must write of them, and arguments as it takes them."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Tools = Sequence[Mapping[str, Any]]
"""Functions that may be called: `function.name` and what else a template writes."""
CHECKED_ROLES = ("developer", "tool")
"""Roles that not every template knows."""


def function_of(stated: Any) -> Mapping[str, Any] | None:
    """Return the function of a tool or a call, `{"function": {…}}` or itself; None where it has no name."""
    function = stated.get("function", stated) if isinstance(stated, Mapping) else None
    is_named = isinstance(function, Mapping) and isinstance(function.get("name"), str) and function["name"]
    return function if is_named else None


def left_out(messages: Sequence[Mapping[str, Any]], tools: Tools | None, text: str) -> str | None:
    """Return which of a conversation's tools, calls and messages of rarer roles its text lacks; None: none."""
    for message in messages:
        content = (message.get("content") or "").strip()
        if message["role"] in CHECKED_ROLES and not _is_in(content, text):
            return f"a {message['role']} message"
        if not all(_is_in(name, text) for name in _names(message.get("tool_calls") or ())):
            return "tool calls"
    return None if all(_is_in(name, text) for name in _names(tools or ())) else "tools"


def has_escaped_arguments(messages: Sequence[Mapping[str, Any]], text: str) -> bool:
    """Return whether arguments that are stated as JSON text stand in a text as a JSON string, their quotes escaped."""
    return any(
        '"' in function["arguments"] and json.dumps(function["arguments"], ensure_ascii=ascii_only) in text
        for function in _of_json_text(messages)
        for ascii_only in (True, False)
    )


def with_objects(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the messages with arguments as objects that are stated as JSON text; None where there are none."""
    if not any(_of_json_text(messages)):
        return None
    others = [copy.deepcopy(dict(message)) for message in messages]
    for function in _of_json_text(others):
        function["arguments"] = _object(function["arguments"])
    return others


def _names(stated: Sequence[Any]) -> Iterator[str]:
    yield from (function["name"] for entry in stated if (function := function_of(entry)) is not None)


def _is_in(piece: str, text: str) -> bool:
    """Return whether a text has a piece, as it is or as JSON writes it."""
    return piece in text or any(json.dumps(piece, ensure_ascii=flag)[1:-1] in text for flag in (True, False))


def _of_json_text(messages: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = function_of(call)
            if function is not None and _object(function.get("arguments")) is not None:
                yield function


def _object(text: Any) -> dict[str, Any] | None:
    """Return the object that a JSON text is; None where it is none."""
    if not isinstance(text, str):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
