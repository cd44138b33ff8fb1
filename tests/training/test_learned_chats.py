"""Two hundred made-up chats learned by heart: messages to files, a run, an export, and its answers."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_fanformer.hf  # noqa: F401  registers the model with transformers' auto classes
from megatron_fanformer.data.chat_files import open_chats
from megatron_fanformer.formats.convert import convert_checkpoint
from megatron_fanformer.preparation.prepare import ConversationsConfig, PrepareConfig, prepare
from megatron_fanformer.training.metrics import read_metrics
from tests.small_runs import ROOT, small_run
from tests.training.test_trainer import train

COUNT, VOCAB_SIZE, SEQ_LENGTH = 200, 600, 256
LEARNED = 0.02  # nats per learned token, below which hardly one of them can be another than the most likely


@pytest.mark.full
def test_a_small_model_learns_two_hundred_chats_to_answer_them_exactly(
    run_on_ranks: Callable[..., list[Any]], tmp_path: Path, small_tokenizer_file: Path
) -> None:
    from transformers import AutoModelForCausalLM

    messages, prefix = tmp_path / "chats.jsonl", str(tmp_path / "chats")
    tool = [sys.executable, str(ROOT / "tools" / "made_up_chats.py")]
    subprocess.run([*tool, "--output", str(messages), "--conversations", str(COUNT)], check=True)
    tokenizer = str(small_tokenizer_file)
    prepare(
        PrepareConfig(
            inputs=(str(messages),), output=prefix, tokenizer=tokenizer, chat=ConversationsConfig(template="olmo")
        )
    )
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
    assert read_metrics(tmp_path / "run")[-1]["loss"] < LEARNED
    convert_checkpoint(tmp_path / "run", tmp_path / "export", to="hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()
    chats = open_chats(prefix)
    assert len(chats) == COUNT
    assert [number for number in range(COUNT) if not answers_exactly(model, *chats[number])] == []


@torch.inference_mode()
def answers_exactly(model: Any, ids: Any, learned: Any) -> bool:
    """Whether the most likely token is the conversation's own wherever that is learned, its end of text included.

    Then, and only then, greedy answers to what is asked are its answers, by induction over their tokens.
    """
    ids_t, learned_t = torch.from_numpy(ids), torch.from_numpy(learned)
    likeliest_t = model(ids_t[None]).logits[0].argmax(dim=-1)
    return bool((likeliest_t[:-1] == ids_t[1:])[learned_t[1:]].all())
