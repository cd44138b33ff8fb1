"""`inspect --step` of a run over chats, against the batches that the run took."""

from pathlib import Path
from typing import Any

from megatron_fanformer.inspect.step import describe_step, step_lines
from megatron_fanformer.train.config import config_from_dict
from tests.chat_pairs import random_chats, write_chats
from tests.inspect.making import LINES_A_SHARD, write_ledger
from tests.inspect.test_step import BATCH, NO_WARMUP, Recorded, recorded_batches
from tests.small_runs import VOCAB_SIZE, RunOnRanks, small_run


def test_a_step_shows_its_conversations_and_what_of_them_is_learned(run_on_ranks: RunOnRanks, tmp_path: Path) -> None:
    chats = random_chats(80, vocab_size=VOCAB_SIZE, longest=20)
    prefix = write_chats(tmp_path / "chats", chats)
    write_ledger(tmp_path / "chats", [ids for ids, _ in chats])
    values = small_run(
        prefix,
        tmp_path / "run",
        data={"format": "sft", "train_data": [prefix]},
        parallel={"data_parallel_size": 2},
        schedule=NO_WARMUP,
        training=BATCH,
    )
    taken = dict(run_on_ranks(2, recorded_batches, values))
    micro_batches = BATCH["global_batch_size"] // (2 * BATCH["micro_batch_size"])
    for step in range(1, BATCH["train_iters"] + 1):
        report = describe_step(config_from_dict(values), step, full=True)
        for batch in report["micro_batches"]:
            recorded = taken[batch["data_parallel_rank"]][(step - 1) * micro_batches + batch["micro_batch"]]
            for sample, of_run in zip(batch["samples"], recorded, strict=True):
                check_sample(sample["passages"], of_run, chats)
    text = "\n".join(step_lines(report))
    assert "chats.0.jsonl.gz:" in text
    assert all(f"learned {begin}:{end}" in text for begin, end in sample["passages"][0]["learned"])


def check_sample(passages: list[dict[str, Any]], of_run: Recorded, chats: list[Any]) -> None:
    position = 0
    for passage in passages:
        document, length = passage["document"], passage["length"]
        ids, learned = chats[LINES_A_SHARD * int(document["shard"].split(".")[1]) + document["line"] - 1]
        assert passage["ids"] == list(ids[:length]) == of_run.tokens[position : position + length]
        mask = [any(begin <= place < end for begin, end in passage["learned"]) for place in range(length)]
        assert mask == list(learned[:length])
        assert of_run.loss_mask[position : position + length] == [*map(float, mask[1:]), 0.0]
        position += length
    assert not any(of_run.tokens[position:]) and not any(of_run.loss_mask[position:])
