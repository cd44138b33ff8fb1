"""What an error's line shows: neither credentials nor what moves a terminal's cursor."""

import errno
import importlib
import pickle
import re
from pathlib import Path
from unittest import mock

import pytest

import megatron_fanformer
from megatron_fanformer.cli import _describe, main
from megatron_fanformer.errors import FanformerError, InputError, escaped, redacted


def test_urls_are_shown_without_users_and_passwords() -> None:
    for user in ("key:secret", "key:sec/ret"):
        assert redacted(f"s3://{user}@bucket/run") == "s3://…@bucket/run"
    shown = "ssh://…@host/run and file:///disk/a@b"
    assert redacted(shown.replace("…", "user")) == shown


@pytest.mark.parametrize("error", [InputError, FanformerError, RuntimeError])
def test_no_error_shows_a_password(error: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    refusal = error("s3://key:secret@bucket/run is not there")
    with mock.patch("megatron_fanformer.prepare.prepare.prepare", side_effect=refusal):
        assert main(["prepare", "a", "--output", "o", "--tokenizer", "t"]) == getattr(error, "exit_code", 1)
    assert "s3://…@bucket/run is not there" in capsys.readouterr().err


def kinds_of_errors() -> list[type[FanformerError]]:
    """All that the package has, by its sources."""
    package = Path(megatron_fanformer.__file__).parent
    classes = [
        (".".join(file.relative_to(package.parent).with_suffix("").parts), *found)
        for file in package.rglob("*.py")
        for found in re.findall(r"^ *class (\w+)\((.*)\):", file.read_text(), re.MULTILINE)
    ]
    names, before = {"FanformerError"}, 0
    while len(names) > before:
        before = len(names)
        names |= {name for _, name, bases in classes if names & set(bases.split(", "))}
    return [getattr(importlib.import_module(module), name) for module, name, _ in classes if name in names]


def test_every_error_can_leave_a_process() -> None:
    kinds = kinds_of_errors()
    assert len(kinds) > 8 and all(issubclass(kind, FanformerError) for kind in kinds)
    for kind in kinds:
        error = kind("a line")
        error.reason = "another's"  # type: ignore[attr-defined]
        other = pickle.loads(pickle.dumps(error))
        assert (type(other), str(other), vars(other)) == (kind, "a line", vars(error))


def test_untrusted_text_moves_no_cursor() -> None:
    assert escaped("a\rb\x1b[2J\tc\nd") == "a\\rb\\x1b[2J\tc\nd"
    assert escaped("Größe 北京") == "Größe 北京"


def test_a_path_that_the_system_refuses_is_the_users_error_and_a_failing_disk_is_not() -> None:
    for number, code in ((errno.ENOENT, 2), (errno.EACCES, 2), (errno.ENOSPC, 1), (errno.EIO, 1)):
        message, exit_code = _describe(OSError(number, "the reason", "the path"))
        assert exit_code == code and message.startswith("the path cannot be used (the reason); ")
