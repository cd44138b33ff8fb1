"""Two hundred made-up chats learned by heart: messages to files, a run, an export, and their answers.

They are asked as a user asks: by the verb `chat`, and of the export by transformers' `apply_chat_template`.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_fanformer.hf  # noqa: F401  registers the model with transformers' auto classes
from megatron_fanformer.preparation.prepare import prepare
from megatron_fanformer.preparation.verb import PrepareConfig
from tests.small_runs import ROOT, small_run
from tests.training.test_trainer import train
from tests.whole_models import convert_checkpoint

COUNT, VOCAB_SIZE, SEQ_LENGTH = 200, 600, 256
LONGEST = 64  # tokens of an answer

Messages = list[dict[str, str]]


@pytest.mark.full
def test_a_small_model_learns_two_hundred_chats_to_answer_them_exactly(
    run_on_ranks: Callable[..., list[Any]], tmp_path: Path, small_tokenizer_file: Path
) -> None:
    messages, prefix = tmp_path / "chats.jsonl", str(tmp_path / "chats")
    tool = [sys.executable, str(ROOT / "tools" / "made_up_chats.py")]
    subprocess.run([*tool, "--output", str(messages), "--conversations", str(COUNT)], check=True)
    tokenizer = str(small_tokenizer_file)
    prepare(PrepareConfig(inputs=(str(messages),), output=prefix, tokenizer=tokenizer, chat=True, chat_template="olmo"))
    values = small_run(
        prefix,
        tmp_path / "run",
        model={"hidden_size": 128, "ffn_hidden_size": 256, "vocab_size": VOCAB_SIZE, "seq_length": SEQ_LENGTH},
        data={"format": "sft", "train_data": [prefix], "tokenizer": tokenizer},
        optimizer={"lr": 3e-3, "weight_decay": 0.0},
        schedule={"lr_warmup_iters": 0, "lr_warmup_fraction": 0.05, "lr_decay_style": "linear", "min_lr": 0.0},
        training={"train_iters": None, "epochs": 60, "global_batch_size": 8, "micro_batch_size": 8},
    )
    run_on_ranks(1, train, values)
    convert_checkpoint(tmp_path / "run", tmp_path / "export", to="hf")
    chats = [json.loads(line)["messages"] for line in messages.read_text().splitlines()]
    assert len(chats) == COUNT
    answers = [message["content"] for chat in chats for message in chat if message["role"] == "assistant"]
    for folder in ("run", "export"):
        assert of_the_verb(tmp_path / folder, chats) == answers
    assert list(of_transformers(tmp_path / "export", chats)) == answers


def of_the_verb(folder: Path, chats: list[Messages]) -> list[str]:
    """What `chat` answers, greedy, to the questions of all chats in a pipe; each chat begins anew."""
    asked = [line for chat in chats for line in (*(one["content"] for one in chat if one["role"] == "user"), "/reset")]
    command = [sys.executable, "-m", "megatron_fanformer", "chat", str(folder), "--max-new-tokens", str(LONGEST)]
    done = subprocess.run(command, cwd=ROOT, input="\n".join(asked), capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@torch.inference_mode()
def of_transformers(folder: Path, chats: list[Messages]) -> Iterator[str]:
    """The same of an export, behind the right answers before."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for chat in chats:
        for turn in range(0, len(chat), 2):
            inputs = tokenizer.apply_chat_template(chat[: turn + 1], add_generation_prompt=True, return_tensors="pt")
            ids = model.generate(**inputs, max_new_tokens=LONGEST, do_sample=False)[0, inputs.input_ids.shape[1] :]
            yield tokenizer.decode(ids, skip_special_tokens=True)
