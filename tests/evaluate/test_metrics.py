"""Metrics from log-probabilities: against plain arithmetic, planted models, simulation, and the library's own."""

import math

import numpy as np
import pytest

from megatron_fanformer.errors import DivergenceError
from megatron_fanformer.evaluate.metrics import document_sums, task_metrics
from megatron_fanformer.evaluate.tasks import OF_CHOICES, OF_ONE_ANSWER
from tests.evaluate.made_up import made_up_requests

CHOICES = [2, 4, 3, 1, 5, 2, 2, 3] * 5
EXACT = 1e-12
DRAWS, SPREAD = 4000, 0.05  # a standard deviation of 4,000 draws is known to 1.1%


def random_scores(requests, seed=1):
    return -np.random.default_rng(seed).exponential(20.0, len(requests))


def plainly(requests, scores, unconditional):
    """The metrics of each document, one after the other: {name: [a value each]}."""
    found: dict[str, list[float]] = {}
    for document in dict.fromkeys(requests.documents.tolist()):
        of_it = [i for i in range(len(requests)) if requests.documents[i] == document]
        right = next(i for i in of_it if requests.choices[i] == requests.labels[i])
        length = {name: values.tolist() for name, values in requests.lengths.items()}
        ways = {
            "acc": {i: scores[i] for i in of_it},
            "len_norm": {i: scores[i] / length["characters_no_space"][i] for i in of_it},
            "len_norm_with_space": {i: scores[i] / length["characters"][i] for i in of_it},
            "per_token": {i: scores[i] / requests.continuation_tokens[i] for i in of_it},
            "pmi": {i: scores[i] - unconditional[i] for i in of_it},
        }
        values = {name: float(max(of_it, key=way.__getitem__) == right) for name, way in ways.items()}
        values["bpb"] = -scores[right] / length["bytes_no_space"][right] / math.log(2)
        values["bpb_with_space"] = -scores[right] / length["bytes"][right] / math.log(2)
        values["ce_loss"] = -scores[right] / length["characters_no_space"][right]
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return found


def test_metrics_are_plain_means_with_their_standard_errors():
    requests = made_up_requests(CHOICES)
    scores, unconditional = random_scores(requests), random_scores(requests, seed=2)
    found = task_metrics(requests, scores, unconditional)
    expected = plainly(requests, scores, unconditional)
    assert found.keys() == expected.keys() == {*OF_CHOICES, "pmi"}
    for name, values in expected.items():
        assert found[name].documents == len(CHOICES)
        assert found[name].value == pytest.approx(np.mean(values), rel=EXACT), name
        assert found[name].standard_error == pytest.approx(np.std(values) / math.sqrt(len(values)), rel=EXACT), name
    p = found["acc"].value
    assert 0 < p < 1
    assert found["acc"].standard_error == pytest.approx(math.sqrt(p * (1 - p) / len(CHOICES)), rel=EXACT)


@pytest.mark.parametrize(("good", "value"), [(0.0, 1.0), (-1000.0, 0.0)])
def test_an_oracle_has_everything_right_and_its_opposite_nothing(good, value):
    requests = made_up_requests([2, 3, 2], metric="f1")
    requests.labels[:] = [0, 0, 2, 2, 2, 1, 1]
    right = requests.labels == requests.choices
    scores = np.where(right, good, -1000.0 - good)
    found = task_metrics(requests, scores, np.full(len(requests), -500.0))
    for name in ("acc", "len_norm", "len_norm_with_space", "per_token", "pmi", "f1"):
        assert (found[name].value, found[name].standard_error) == (value, 0.0), name
    for name in ("bpb", "bpb_with_space", "ce_loss"):
        assert (found[name].value == 0.0) == (good == 0.0), name


def test_a_task_of_one_answer_has_the_metrics_of_the_answer_alone():
    requests = made_up_requests([1] * 9, metric="bpb")
    found = task_metrics(requests, np.full(9, -2.0))
    assert found.keys() == set(OF_ONE_ANSWER)
    assert found["bpb"].value == pytest.approx(
        np.mean(2.0 / math.log(2) / requests.lengths["bytes_no_space"]), rel=EXACT
    )


def test_f1_is_of_the_first_choice_and_its_error_that_of_resampled_documents():
    requests = made_up_requests([2] * 300, metric="f1", seed=5)
    scores = random_scores(requests)
    found = task_metrics(requests, scores)["f1"]
    predicted, labels = scores.reshape(-1, 2).argmax(axis=1), requests.labels[::2]
    hits = np.sum((predicted == 0) & (labels == 0))
    precision, recall = hits / np.sum(predicted == 0), hits / np.sum(labels == 0)
    assert found.value == pytest.approx(2 * precision * recall / (precision + recall), rel=EXACT)
    drawn = np.random.default_rng(0).integers(0, 300, (DRAWS, 300))
    numerators, denominators = document_sums(requests, scores)["f1"][drawn].sum(axis=1).T
    assert found.standard_error == pytest.approx(np.std(numerators / denominators), rel=SPREAD)


def test_a_continuation_without_length_is_never_chosen():
    requests = made_up_requests([2])
    requests.labels[:] = 1
    requests.lengths["characters_no_space"][:] = [0, 5]
    assert task_metrics(requests, np.array([-0.1, -50.0]))["len_norm"].value == 1.0


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_numbers_that_are_not_finite_are_told(bad):
    requests = made_up_requests([2, 2])
    with pytest.raises(DivergenceError, match="task made_up: 1 of 4 log-probabilities are not finite"):
        task_metrics(requests, np.array([-1.0, bad, -1.0, -1.0]))
