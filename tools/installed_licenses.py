"""Says whether an installed package's metadata state a free license: what `tools/installed_text.py` may read.

On the lists are licenses that let anybody use and pass on the text with no more than a notice, and the MPL, whose terms
stay with the file. A statement that is not understood is no permission.
"""

import re
from collections.abc import Iterator
from importlib.metadata import PackageMetadata

ACCEPTED = frozenset(
    {
        "0BSD",
        "Apache-2.0",
        "BlueOak-1.0.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-Python",
        "HPND",
        "ISC",
        "MIT",
        "MIT-0",
        "MIT-CMU",
        "MPL-2.0",
        "NCSA",
        "PSF-2.0",
        "Python-2.0",
        "Unicode-3.0",
        "Unlicense",
        "X11",
        "Zlib",
        "ZPL-2.1",
    }
)
"""SPDX identifiers."""
ACCEPTED_CLASSIFIERS = frozenset(
    {
        "Apache Software License",
        "Boost Software License 1.0 (BSL-1.0)",
        "BSD License",
        "CC0 1.0 Universal (CC0 1.0) Public Domain Dedication",
        "Historical Permission Notice and Disclaimer (HPND)",
        "ISC License (ISCL)",
        "MIT License",
        "MIT No Attribution License (MIT-0)",
        "Mozilla Public License 2.0 (MPL 2.0)",
        "Public Domain",
        "Python Software Foundation License",
        "The Unlicense (Unlicense)",
        "Zero-Clause BSD (0BSD)",
        "zlib/libpng License",
    }
)
SAY_NOTHING = frozenset({"OSI Approved", "DFSG approved"})
"""Classifiers of a license that name none."""
NAMES = {
    "apache": "Apache-2.0",
    "apache 2": "Apache-2.0",
    "apache2": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache software": "Apache-2.0",
    "apache software 2.0": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd 2-clause": "BSD-2-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "2-clause bsd": "BSD-2-Clause",
    "3-clause bsd": "BSD-3-Clause",
    "new bsd": "BSD-3-Clause",
    "modified bsd": "BSD-3-Clause",
    "isc": "ISC",
    "mit": "MIT",
    "mozilla public 2.0": "MPL-2.0",
    "psf": "PSF-2.0",
    "unlicense": "Unlicense",
}
"""What the free text of the field `License` says, in lower case and without the words of `FILLING`."""
FILLING = re.compile(r"\b(the|licen[sc]ed?|version)\b|[,\"']|\(.*\)")
MOST_NAME = 80  # characters: what is longer is the license's own text


def license_of(metadata: PackageMetadata) -> tuple[str | None, str]:
    """The free license of a package, or None, and what its metadata say of it.

    Of the three fields that may state one, the first counts: the SPDX expression, the classifiers, the free text.
    """
    found: dict[str, list[str]] = {}
    for key, value in metadata.items():  # type: ignore[attr-defined]
        found.setdefault(key.lower(), []).append(value)
    if expression := " ".join(found.get("license-expression", [])):
        return (expression if is_accepted(expression) else None), expression
    last = [each.split(" :: ")[-1] for each in found.get("classifier", []) if each.startswith("License ::")]
    if classifiers := [each for each in last if each not in SAY_NOTHING]:
        stated = ", ".join(classifiers)
        return (stated if ACCEPTED_CLASSIFIERS.issuperset(classifiers) else None), stated
    text = " ".join(" ".join(found.get("license", [])).split())
    if not text:
        return None, "states no license"
    if len(text) > MOST_NAME:
        return None, f"{text[:MOST_NAME]}…"
    name = NAMES.get(" ".join(FILLING.sub(" ", text.lower()).split()), text)
    return (name if is_accepted(name) else None), text


def is_accepted(expression: str) -> bool:
    """Whether an SPDX expression leaves a choice of accepted licenses alone; an exception only permits more."""
    if expression.count("(") != expression.count(")"):
        return False
    words = iter([*re.findall(r"[()]|[^\s()]+", expression), ")"])
    return _any_of(words) and next(words, None) is None


def _any_of(words: Iterator[str]) -> bool:
    """Read up to the closing parenthesis: any of several, each of which is all of several."""
    choices, together = [], []
    for word in words:
        if word == ")":
            break
        if word == "(":
            together.append(_any_of(words))
        elif word.upper() == "OR":
            choices.append(bool(together) and all(together))
            together = []
        elif word.upper() == "WITH":
            next(words)
        elif word.upper() != "AND":
            together.append(word in ACCEPTED)
    return any([*choices, bool(together) and all(together)])
