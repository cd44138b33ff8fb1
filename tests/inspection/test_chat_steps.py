"""`inspect --step` of a run over chats, against the batches that the run took."""

from pathlib import Path
from typing import Any

from megatron_fanformer.inspection import step_report
from megatron_fanformer.inspection.step import StepSamples
from megatron_fanformer.training.config import config_from_dict
from tests.chat_pairs import random_chats, write_chats
from tests.inspection.making import LINES_A_SHARD, write_ledger
from tests.inspection.test_step import BATCH, NO_WARMUP, Recorded, recorded_batches
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
        shown = StepSamples(config_from_dict(values), step)
        for batch, samples in shown.micro_batches():
            recorded = taken[batch.data_parallel_rank][(step - 1) * micro_batches + batch.number]
            for sample, of_run in zip(samples, recorded, strict=True):
                check_sample(sample, of_run, chats)
    text = "\n".join(step_report.lines(shown, full=False))
    spans = [f"learned {begin}:{end}" for begin, end in step_report.learned_spans(sample.passages[0])]
    assert "chats.0.jsonl.gz:" in text and all(span in text for span in spans)


def check_sample(sample: Any, of_run: Recorded, chats: list[Any]) -> None:
    assert of_run.tokens == sample.ids + [0] * (len(of_run.tokens) - len(sample.ids))
    position = 0
    for passage in sample.passages:
        shard = int(passage.document.shard.split(".")[1])
        number = LINES_A_SHARD * shard + passage.document.line - 1
        ids, learned = chats[number]
        length = len(passage.ids)
        assert passage.ids == list(ids[:length]) and passage.learned == list(learned[:length])
        assert of_run.loss_mask[position : position + length - 1] == [float(each) for each in passage.learned[1:]]
        assert of_run.loss_mask[position + length - 1] == 0.0
        position += length
    assert not any(of_run.loss_mask[position:])
