"""The tasks by name: groups, the paper's metrics, and the library's own table."""

import pytest

from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate.tasks import OF_ONE_ANSWER, TASKS, resolve

OF_THE_PAPER = {
    "len_norm": {"piqa", "hellaswag", "openbook_qa", "arc_challenge", "rte"},
    "acc": {"winogrande", "boolq", "sciq", "arc_easy", "copa", "commitment_bank", "sst2"},
    "f1": {"mrpc"},
}
OF_OLMES = {  # its suite for OLMo 1, the paper's table 1
    "pmi": {"arc_challenge_rc_0shot", "arc_easy_rc_0shot", "openbookqa_rc_0shot"},
    "per_token": {"hellaswag_rc_0shot", "piqa_rc_0shot", "winogrande_rc_0shot"},
    "acc": {"boolq_rc_0shot", "sciq_rc_0shot"},
}


@pytest.mark.parametrize(("group", "expected"), [("paper", OF_THE_PAPER), ("olmo-core-8", OF_OLMES)])
def test_a_group_has_the_published_tasks_with_their_metrics(group, expected):
    found: dict[str, set[str]] = {}
    for task in resolve([group]):
        found.setdefault(task.metric, set()).add(task.name)
    assert found == expected


def test_names_and_groups_give_each_task_once_in_their_order():
    subjects = [f"mmlu_{subject}" for subject in ("stem", "humanities", "social_sciences", "other")]
    assert [task.name for task in resolve(["sst2", "mmlu", "mmlu_other", "sst2"])] == ["sst2", *subjects]


def test_unknown_names_are_told_together_with_what_may_be_meant():
    with pytest.raises(InputError) as refused:
        resolve(["hellaswagg", "sst2", "papers", "xyzzy", "q.jsonl"])
    assert str(refused.value).splitlines() == [
        "unknown task hellaswagg; did you mean hellaswag?",
        "unknown task papers; did you mean paper?",
        "unknown task xyzzy; the groups are paper, olmo-core-8, mmlu, easy, generation",
        "unknown task q.jsonl; prepare a file of questions with `evaluate --prepare`, and name its task here as "
        "own:NAME",
    ]


def test_choice_tasks_are_the_librarys_and_so_are_their_metrics_but_for_the_space(task_library):
    table = task_library.tasks.LABEL_TO_TASK_MAP
    assert set(table) == {name for name, task in TASKS.items() if not task.is_generated}
    for label, entry in table.items():
        kind, options = entry if isinstance(entry, tuple) else (entry, {})
        if label in set.union(*OF_OLMES.values()):
            continue
        theirs, ours = options.get("metric_type") or kind.metric_type, TASKS[label].metric
        spaced = f"{theirs}_with_space" if theirs in ("len_norm", "bpb") else theirs
        assert ours == (spaced if kind is task_library.tasks.OEEvalTask else theirs), label
        assert (theirs in ("bpb", "ce_loss")) == (ours in OF_ONE_ANSWER), label
