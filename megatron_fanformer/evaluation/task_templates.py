"""Templates of lm-eval's tasks, as far as they are plain: names of fields, and `{{ … }}` around them.

An expression is a field with what it holds (`question.stem`, `choices[0]`, `choices['text']`), with `.strip()` or
`| trim` behind it, a text in quotes, or a list of these. No other Jinja is read: it would be a program.
"""

import ast
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

FIELD = re.compile(r"\{\{-?\s*(.*?)\s*-?\}\}", re.DOTALL)
NAME = re.compile(r"[A-Za-z_]\w*")
PART = re.compile(
    r"\.strip\(\)|\s*\|\s*trim\b|\.([A-Za-z_]\w*)(?!\w*\()|\[(-?\d+)\]|\['([^'\\]*)'\]|\[\"([^\"\\]*)\"\]"
)
DIGITS = re.compile(r"[0-9]{1,9}")  # more are no choice's number
QUOTED = re.compile(r"'([^'\\]*)'|\"([^\"\\]*)\"")


def as_text(template: Any, document: Mapping[str, Any], columns: Set[str]) -> str:
    """Return the text of `doc_to_text` for a document.

    Raises:
        ValueError: the template is not plain, or the document has no such field, or not a text there.
    """
    if not isinstance(template, str):
        raise ValueError(f"doc_to_text is {template!r}; it must be a field or a text")
    if template in columns:
        value = _value(template, document)
        if not isinstance(value, str):
            raise ValueError(f"{template} is no text; write one")
        return value
    return _rendered("doc_to_text", template, document)


def as_choices(template: Any, document: Mapping[str, Any], columns: Set[str]) -> Sequence[str]:
    """Return the choices of `doc_to_choice` for a document; raises like `as_text`."""
    found: Any
    if isinstance(template, dict):
        found = list(template.values())
    elif isinstance(template, str):
        whole = FIELD.fullmatch(template.strip())
        if template not in columns and whole is None:
            raise ValueError(f"doc_to_choice is {template!r}; it must be a field, a list, or one {{{{ … }}}}")
        found = _value(template, document) if template in columns else _expression("doc_to_choice", whole[1], document)  # type: ignore[index]
    else:
        found = template
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError("its choices are no list of texts; write one")
    if len(found) < 2:
        raise ValueError(f"it has {len(found)} choices; a question needs two or more")
    if "" in found:  # a score by its length would be infinite
        raise ValueError(f"its choice {found.index('')} (from 0) is empty; write a text")
    return found


def as_target(template: Any, document: Mapping[str, Any], columns: Set[str], choices: Sequence[str]) -> int:
    """Return the number of the right choice by `doc_to_target`; raises like `as_text`, and where it is none of them."""
    found: Any = template
    if isinstance(template, str):
        if template in columns:
            found = _value(template, document)
        else:
            found = _rendered("doc_to_target", template, document)
            found = int(found) if DIGITS.fullmatch(found) else found
    if type(found) is int and 0 <= found < len(choices):
        return found
    if isinstance(found, str) and found in choices:
        return choices.index(found)
    raise ValueError(f"its answer is {found!r}, neither one of the choices nor a number from 0 to {len(choices) - 1}")


def _rendered(name: str, template: str, document: Mapping[str, Any]) -> str:
    text, position = "", 0
    for match in FIELD.finditer(template):
        text += _plain(name, template[position : match.start()])
        value = _expression(name, match[1], document)
        if not isinstance(value, str | int | float):
            raise ValueError(f"{name} has {match[0]}, which is no text here")
        text, position = text + str(value), match.end()
        if match[0].startswith("{{-") or match[0].endswith("-}}"):
            raise ValueError(f"{name} has {match[0]}; write it without '-'")
    return text + _plain(name, template[position:])


def _plain(name: str, text: str) -> str:
    if found := re.search(r"\{[%#{]|[%#}]\}", text):
        raise ValueError(f"{name} has {text[found.start() :][:30]!r}; of Jinja only {{{{ FIELD }}}} is read here")
    return text


def _expression(name: str, text: str, document: Mapping[str, Any]) -> Any:
    if match := QUOTED.fullmatch(text):
        return match[1] if match[1] is not None else match[2]
    if text.startswith("[") and text.endswith("]"):
        return [_expression(name, each.strip(), document) for each in _listed(text[1:-1])]
    begin = NAME.match(text)
    if begin is None:
        raise ValueError(f"{name} has {{{{ {text} }}}}; of Jinja only {{{{ FIELD }}}} is read here")
    value, position = _value(begin[0], document), begin.end()
    while position < len(text):
        part = PART.match(text, position)
        if part is None:
            raise ValueError(f"{name} has {{{{ {text} }}}}; of Jinja only {{{{ FIELD }}}} is read here")
        value, position = _inside(name, text, value, part), part.end()
    return value


def _inside(name: str, text: str, value: Any, part: "re.Match[str]") -> Any:
    key = next((group for group in part.groups() if group is not None), None)
    if key is None:
        if not isinstance(value, str):
            raise ValueError(f"{name} has {{{{ {text} }}}}, which strips what is no text")
        return value.strip()
    try:
        if part[2] is not None:
            return value[ast.literal_eval(key)]
        if isinstance(value, dict):
            return value[key]
    except (LookupError, TypeError):
        pass
    raise ValueError(f"{name} has {{{{ {text} }}}}, and there is no {part[0]} in it")


def _listed(text: str) -> list[str]:
    """Cut a list at its commas, outside of quotes and brackets."""
    return [each for each in re.findall(r"(?:'[^']*'|\"[^\"]*\"|\[[^\]]*\]|[^,'\"\[])+", text) if each.strip()]


def _value(name: str, document: Mapping[str, Any]) -> Any:
    if name not in document:
        raise ValueError(f"it has no field {name}; add it")
    return document[name]
