"""`inspect --step` against training itself: the batches that a run recorded, and the documents that they are of."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_fanformer.cli import main
from megatron_fanformer.data import remote_files
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.inspect.step import describe_step, step_lines
from megatron_fanformer.train.config import config_from_dict
from tests.chat_pairs import random_chats, write_chats
from tests.conftest import SAMPLES
from tests.data.failing_stores import planned
from tests.inspect.conftest import TOKENIZER, Inspect
from tests.inspect.making import LINES_A_SHARD, random_documents, write_ledger, write_manifest, write_npy, write_pair
from tests.small_runs import VOCAB_SIZE, RunOnRanks, small_run, write_config

STEPS = 3
BATCH = {"train_iters": STEPS, "global_batch_size": 8, "micro_batch_size": 2}
NO_WARMUP = {"lr_warmup_iters": 0}
OLMO_VOCABULARY = 50_280
FULL = pytest.mark.full
Texts = tuple[Path, list[list[int]]]


class Recorded(NamedTuple):
    """One sample as the trainer got it."""

    tokens: list[int]
    labels: list[int]
    loss_mask: list[float]


# -- on every rank


def recorded_batches(values: dict[str, Any]) -> tuple[int, list[list[Recorded]]]:
    """Train a configuration; this rank's data parallel rank, and its micro batches in their order."""
    from megatron_fanformer.runtime.parallel import rank_grid
    from megatron_fanformer.train.trainer import Trainer

    config, taken = config_from_dict(values), []

    def recording(batches: Any) -> Any:
        for batch in batches:
            fields = (batch[name].tolist() for name in Recorded._fields)
            taken.append([Recorded(*sample) for sample in zip(*fields, strict=True)])
            yield batch

    with rank_grid(config.parallel, "cpu") as grid:
        trainer = Trainer(config, grid)
        trainer._batches = recording(trainer._batches)
        trainer.train()
        trainer.close()
        return grid.data_parallel_rank, taken


# -- against training


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """`train_data` of each kind; the second pair alone has a ledger."""
    folder = tmp_path_factory.mktemp("sources")
    first, second, third = (random_documents(VOCAB_SIZE, seed=seed) for seed in range(3))
    pairs = [write_pair(folder / "first", first), write_pair(folder / "second", second)]
    write_ledger(folder / "second", second)
    npy = write_npy(folder / "third", third)
    return {
        "pair": [pairs[0]],
        "npy": [npy],
        "blend": ["0.3", pairs[0], "0.7", pairs[1]],
        "mixed": ["0.5", pairs[1], "0.5", npy],
    }


def shown(values: dict[str, Any], step: int) -> dict[tuple[int, int], list[list[int]]]:
    """What `inspect` says: by rank and micro batch, the token ids of the samples."""
    report = describe_step(config_from_dict(values), step)
    return {
        (batch["data_parallel_rank"], batch["micro_batch"]): [
            [token for passage in sample["passages"] for token in passage["ids"]] for sample in batch["samples"]
        ]
        for batch in report["micro_batches"]
    }


def same_tokens(recorded: Recorded, ids: list[int]) -> bool:
    """A last label that the loss does not read is none of a sample's tokens."""
    return ids == recorded.tokens + recorded.labels[-1:] * int(recorded.loss_mask[-1])


@pytest.mark.parametrize(
    ("kind", "data_parallel_size"),
    [
        pytest.param(kind, size, marks=() if (kind, size) in (("pair", 1), ("npy", 2), ("mixed", 2)) else FULL)
        for kind in ("pair", "npy", "blend", "mixed")
        for size in (1, 2)
    ],
)
def test_a_step_takes_what_inspect_shows(
    run_on_ranks: RunOnRanks, sources: dict[str, list[str]], tmp_path: Path, kind: str, data_parallel_size: int
) -> None:
    values = small_run(
        "",
        tmp_path / "run",
        data={"train_data": sources[kind]},
        parallel={"data_parallel_size": data_parallel_size},
        schedule=NO_WARMUP,
        training=BATCH,
    )
    ranks = run_on_ranks(data_parallel_size, recorded_batches, values)
    batches_a_step = 4 // data_parallel_size
    for step in range(1, STEPS + 1):
        expected = shown(values, step)
        assert len(expected) == 4
        for rank, taken in ranks:
            own = taken[(step - 1) * batches_a_step : step * batches_a_step]
            for number, samples in enumerate(own):
                ids = expected[rank, number]
                assert len(samples) == len(ids) == BATCH["micro_batch_size"]
                assert all(map(same_tokens, samples, ids)), (step, rank, number)
    assert len({tuple(ids) for batch in expected.values() for ids in batch}) == BATCH["global_batch_size"]


# -- documents


@pytest.fixture
def texts(tmp_path: Path) -> Texts:
    """A configuration that trains on real text, and the documents' ids."""
    tokenizer = load_tokenizer(TOKENIZER)
    documents = [
        [*tokenizer.encode(f"Document {number} says: " + "all work and no play\n" * (1 + number % 4)), tokenizer.eod_id]
        for number in range(40)
    ]
    write_pair(tmp_path / "docs", documents)
    write_ledger(tmp_path / "docs", documents)
    values = small_run(
        str(tmp_path / "docs"),
        tmp_path / "run",
        model={"vocab_size": OLMO_VOCABULARY},
        data={"tokenizer": str(TOKENIZER)},
        training=BATCH,
    )
    return write_config(tmp_path / "run.yaml", values), documents


def test_each_passage_is_a_slice_of_its_document(inspect: Inspect, texts: Texts) -> None:
    config, documents = texts
    tokenizer = load_tokenizer(TOKENIZER)
    output = inspect(config, "--step", 2, "--json")
    assert (output.code, output.error) == (0, "")
    step = json.loads(output.out)
    assert (step["first_sample"], step["end_sample"]) == (8, 16)
    samples = [sample for batch in step["micro_batches"] for sample in batch["samples"]]
    assert [sample["sample"] for sample in samples] == list(range(8, 16))
    for sample in samples:
        assert sum(passage["length"] for passage in sample["passages"]) == 17
        for passage in sample["passages"]:
            document = passage["document"]
            number = int(document["shard"].split(".")[1]) * 20 + document["line"] - 1
            assert document["id"] == (None if number % 3 == 2 else f"docs-{number}")
            assert document["length"] == len(documents[number])
            first = document["first_token"]
            assert passage["ids"] == documents[number][first : first + passage["length"]]
            assert passage["first_token"] == sum(map(len, documents[:number])) + first
            assert passage["text"] == tokenizer.decode(passage["ids"])


def test_a_run_knows_its_own_configuration(inspect: Inspect, texts: Texts, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(texts[0].read_text())
    assert inspect(run, "--step", 3).out == inspect(texts[0], "--step", 3).out


def test_the_manifest_names_the_tokenizer(inspect: Inspect, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    documents = [tokenizer.encode("to be or not to be, that is the question ") for _ in range(60)]
    prefix = write_pair(tmp_path / "docs", documents)
    write_manifest(prefix, documents, TOKENIZER)
    values = small_run(prefix, tmp_path / "run", model={"vocab_size": OLMO_VOCABULARY}, training=BATCH)
    config = write_config(tmp_path / "run.yaml", values)
    assert "that is the question" in inspect(config, "--step", 1).out
    other = Path(shutil.copy(TOKENIZER, tmp_path / "tokenizer.json"))
    write_manifest(prefix, documents, other)
    other.write_text(other.read_text() + "\n")  # another file under the same name
    output = inspect(config, "--step", 1)
    assert "      ids " in output.out and "question" not in output.out


# -- what cannot be shown


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["{config}", "--step", "0"], "--step is 0; the run has steps 1 to 3 (training.train_iters)"),
        (["{docs}", "--step", "1"], "docs is a prefix of token files (or one of them); name a run's folder"),
        (["{config}", "--step", "1", "--verify"], "argument --verify: not allowed with argument --step"),
        (["{config}", "--step", "1", "--training.micro_batch_size", "3"], "is not a multiple of micro batch size"),
        (["{docs}", "--speed", "3"], "--speed has no effect without --step"),
    ],
)
def test_a_step_that_cannot_be_shown(
    inspect: Inspect, texts: Texts, tmp_path: Path, arguments: list[str], output: str
) -> None:
    places = {"config": texts[0], "docs": tmp_path / "docs"}
    found = inspect(*(argument.format(**places) for argument in arguments))
    assert (found.code, found.out) == (2, "")
    assert output in found.error


# -- conversations


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
        report = describe_step(config_from_dict(values), step)
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


# -- on another store


def test_token_files_on_another_store_are_shown_and_verified_as_here(
    inspect: Inspect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    prefix = tmp_path / "docs"
    options = ["--output", str(prefix), "--tokenizer", str(TOKENIZER), "--workers", "1"]
    assert main(["prepare", str(SAMPLES / "dolma"), *options]) == 0

    def shown(place: str, *options: str) -> str:
        remote_files.forget_files()
        found = inspect(place, *options)
        assert found.error == ""
        return found.out.replace(url, str(tmp_path))

    with planned(tmp_path) as url:
        assert shown(f"{url}/docs", "--verify") == shown(f"{tmp_path}/docs", "--verify")
        ledger, tokens = (prefix.with_name(f"docs{suffix}") for suffix in (".ledger.parquet", ".bin"))
        for file in (ledger, tokens):
            sound = file.read_bytes()
            file.write_bytes(sound[:-9] + b"\xee" + sound[-8:])
            remote_files.forget_files()
            found = inspect(f"{url}/docs", "--verify")
            assert (found.code, found.error.split(" ")[0]) == (3, f"{url}/{file.name}")
            file.write_bytes(sound)
        tokens.unlink()
        remote_files.forget_files()
        found = inspect(f"{url}/docs", "--verify")
        assert found.code == 3 and f"{url}/docs.bin, which its manifest lists, is not there" in found.error
