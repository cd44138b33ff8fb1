"""Leave-Square-Out: the split, the scores of planted answers, runs that go on, and (`full`) a training."""

from dataclasses import replace

import pytest
import torch

from megatron_fanformer.errors import CorruptError
from megatron_fanformer.experiments import holes
from megatron_fanformer.experiments.probe import HolesSettings

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


@pytest.mark.parametrize(("task", "middle"), [("modular", 56), ("linear", 50)])
def test_the_answers_are_right_and_the_hole_is_where_the_paper_has_it(task, middle):
    pairs = holes.all_pairs(task, 10)
    in_hole = set()
    for tokens, answer, is_in in zip(*(column.tolist() for column in pairs), strict=True):
        a, b = (token for token in tokens if token <= holes.LARGEST_ANSWER)
        assert answer == ((a + b) % 113 if task == "modular" else a + 2 * b + 3)
        if is_in:
            in_hole.add((a, b))
    assert in_hole == {(middle + i, middle + j) for i in range(-10, 11) for j in range(-10, 11)}


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
