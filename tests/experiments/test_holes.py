"""Leave-Square-Out: the split, the scores of planted answers, runs that go on, and (`full`) a training."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_fanformer.cli import main
from megatron_fanformer.data.chat_template import encode_chat, find_template
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.experiments import holes
from megatron_fanformer.experiments.probe import HolesSettings
from megatron_fanformer.experiments.result import read_result
from tests.generate.making import write_export, write_tokenizer

TINY = HolesSettings(seeds=2, tasks=("linear",), weight_decays=(0.0,), hidden_size=16, num_heads=2, steps=1)


@pytest.mark.parametrize("task", ["modular", "linear"])
def test_no_batch_holds_a_pair_of_the_hole_and_an_epoch_holds_all_others(task):
    settings = HolesSettings(batch_size=536, steps=46)  # two epochs of 23 batches
    pairs = holes.all_pairs(task, settings.half_side)
    assert (pairs.in_hole_n.sum(), (~pairs.in_hole_n).sum()) == (441, 12_328)
    batches = list(holes._batches(pairs, settings, 0))
    assert len(batches) == 46
    for epoch in (batches[:23], batches[23:]):
        numbers = torch.cat(epoch)
        assert not pairs.in_hole_n[numbers].any()
        assert len(numbers.unique()) == len(numbers) == 12_328
    assert not torch.equal(batches[0], batches[23])


@pytest.mark.parametrize(("task", "middle"), [("modular", (56, 56)), ("linear", (50, 50))])
def test_the_conversations_are_right_and_the_hole_is_where_the_paper_has_it(task, middle, tmp_path):
    settings = HolesSettings(tasks=(task,))
    holes.write_data(settings, tmp_path)
    by_file = {}
    for name in ("train", "hole"):
        asked = []
        for line in (tmp_path / f"{task}-{name}.jsonl").read_text().splitlines():
            user, assistant = json.loads(line)["messages"]
            a, b = map(int, re.findall(r"\d+", user["content"]))
            assert user["content"] == (f"{a}+{b}=" if task == "modular" else f"({a},{b})=")
            assert int(assistant["content"]) == ((a + b) % 113 if task == "modular" else a + 2 * b + 3)
            asked.append((a, b))
        by_file[name] = asked
    assert set(by_file["hole"]) == {(middle[0] + i, middle[1] + j) for i in range(-10, 11) for j in range(-10, 11)}
    assert len(by_file["train"]) == 12_328 and not set(by_file["train"]) & set(by_file["hole"])


def planted(pairs, known):
    """Logits that are sure of the right answer to the known pairs, and of a symbol on the others."""
    rows = {
        tuple(tokens): answer for tokens, answer in zip(pairs.tokens_ns.tolist(), pairs.answers_n.tolist(), strict=True)
    }
    known = {tuple(tokens) for tokens in pairs.tokens_ns[known].tolist()}

    def logits(tokens_ns):
        message = [rows[tuple(t)] if tuple(t) in known else holes.LARGEST_ANSWER + 1 for t in tokens_ns.tolist()]
        return 1e4 * torch.nn.functional.one_hot(torch.tensor(message), holes.VOCABULARY).float()

    return logits


def test_a_look_up_table_scores_0_in_the_hole_and_an_oracle_1():
    pairs = holes.all_pairs("modular", 10)
    for known, in_hole in ((~pairs.in_hole_n, 0.0), (torch.ones_like(pairs.in_hole_n), 1.0)):
        probability, right = holes.score(planted(pairs, known), pairs, 0.5)
        assert probability[pairs.in_hole_n].unique().tolist() == [in_hole]
        assert right[pairs.in_hole_n].float().unique().tolist() == [in_hole]
        assert right[~pairs.in_hole_n].all()


@pytest.mark.full
def test_a_probe_that_was_stopped_goes_on_with_the_runs_that_are_left(tmp_path, monkeypatch):
    real, trained = holes.train, []

    def stopping(settings, run_settings):
        if len(trained) == 3 and not (tmp_path / "went-on").exists():
            raise KeyboardInterrupt
        trained.append((run_settings["seed"], run_settings["architecture"]))
        return real(settings, run_settings)

    monkeypatch.setattr(holes, "train", stopping)
    with pytest.raises(KeyboardInterrupt):
        holes.measure(TINY, tmp_path, lambda _: None)
    (tmp_path / "went-on").touch()
    measured = holes.measure(TINY, tmp_path, lambda _: None)
    assert trained == [(seed, name) for seed in (0, 1) for name in holes.ARCHITECTURES], "each once"
    assert measured.seconds == pytest.approx(sum(row[-1] for row in measured.tables[0].rows), abs=0.1), "of all four"
    assert len(measured.tables[0].rows) == 4 and measured.pictures["holes-linear.png"].startswith(b"\x89PNG")
    assert {finding.shows for finding in measured.findings[:2]} == {False}, "one step teaches nothing"

    holes.measure(replace(TINY, steps=2, seeds=1), tmp_path, lambda _: None)
    assert len(trained) == 6, "runs of other settings do not count"
    next((tmp_path / "runs").glob("*seed-0-fanformer.json")).write_text("{}")
    with pytest.raises(CorruptError, match="no finished run"):
        holes.measure(replace(TINY, steps=2, seeds=1), tmp_path, lambda _: None)


# -- fine-tuned checkpoints

VOCAB_SIZE = 600


class Planted:
    """Logits that follow from the two tokens before, but for those of conversations that it knows by heart."""

    def __init__(self, known):
        self.table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
        self.known = {tuple(ids[:place].tolist()): int(ids[place]) for ids in known for place in range(1, len(ids))}

    def logits(self, ids_bs):
        logits_bsv = self.table[ids_bs] + 0.5 * self.table[ids_bs.roll(1, 1)]
        for row, ids in enumerate(ids_bs.tolist()):
            for place in range(len(ids)):
                if (message := self.known.get(tuple(ids[: place + 1]))) is not None:
                    logits_bsv[row, place, message] = 1e4
        return logits_bsv


@pytest.fixture
def rows(small_tokenizer_file):
    """Conversations of one to three digits an answer, of several lengths."""
    template, tokenizer = find_template(small_tokenizer_file, "olmo"), load_tokenizer(small_tokenizer_file)
    pairs = holes.all_pairs("linear", 10)
    return [
        encode_chat(tokenizer, template.render(holes.conversation(pairs, "linear", n))) for n in range(0, 12_000, 997)
    ]


def test_an_answer_is_all_its_tokens_and_the_end_of_text(rows):
    model, temperature = Planted([]), 0.5
    probability, right = holes.answered(model, rows, temperature)
    assert len({len(ids) for ids, _ in rows}) > 1
    assert not right.any()
    for (ids, learned), found in zip(rows, probability.tolist(), strict=True):
        expected = 1.0
        for place in range(1, len(ids)):
            if learned[place]:
                weights = (model.logits(torch.tensor(ids[None, :place]))[0, -1].double() / temperature).exp()
                expected *= (weights[ids[place]] / weights.sum()).item()
        assert learned.sum() > 1 and math.isclose(found, expected, rel_tol=1e-9)


def test_a_model_knows_what_it_knows_whole(rows):
    """Of the last one all but the end of text: the answer goes on then, and is another."""
    known = [ids for ids, _ in rows[::2]]
    last, learned = rows[1]
    end = int(learned.nonzero()[0][-1])
    probability, right = holes.answered(Planted([*known, last[:end]]), rows, 0.5)
    assert right.tolist() == [place % 2 == 0 for place in range(len(rows))]
    assert probability[::2].tolist() == [1.0] * len(known)
    assert probability[1] < 0.1


@pytest.mark.full
def test_a_checkpoint_is_asked_by_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exports = [str(tmp_path / name) for name in ("with-a-template", "without-one")]
    tokenizer = write_tokenizer(tmp_path)
    for folder, template in zip(
        exports, ("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}", None), strict=True
    ):
        write_export(Path(folder), "fanformer-tied", tokenizer, template)
    command = ["experiment", "holes", "--holes.tasks", "[modular]", "--output", str(tmp_path / "holes")]
    assert main([*command, "--checkpoint", exports[0], "--checkpoint", exports[1]]) == 2
    assert "has no chat template" in capsys.readouterr().err
    assert main([*command, "--checkpoint", exports[0]]) == 0
    result = read_result(tmp_path / "holes")
    assert [finding.shows for finding in result.findings] == [None]
    assert result.settings.keys() == {"checkpoints", "tasks", "half_side", "temperature"}
    assert (tmp_path / "holes" / "holes-modular.png").read_bytes().startswith(b"\x89PNG")
