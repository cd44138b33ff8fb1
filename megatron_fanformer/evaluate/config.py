"""The section `evaluation` of a run's configuration, and the evaluation that the options of `evaluate` request."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron_fanformer.data.token_files import NpyType
from megatron_fanformer.errors import InputError, broken_fields
from megatron_fanformer.evaluate.tasks import resolve
from megatron_fanformer.evaluate.verb import EvaluateOptions
from megatron_fanformer.model.layouts import Layout

Group = Literal["v2-small", "v3-small"]

SETS: dict[Group, tuple[str, ...]] = {
    "v2-small": (
        *("4chan", "c4_100_domains", "c4_en", "gab", "ice", "m2d2_s2orc", "m2d2_wiki", "manosphere", "mc4_en"),
        *("pile", "ptb", "twitterAEC", "wikitext_103"),
    ),
    "v3-small": (
        *("c4_en", "dolma_books", "dolma_common-crawl", "dolma_pes2o", "dolma_reddit", "dolma_stack", "dolma_wiki"),
        *("ice", "m2d2_s2orc", "pile", "wikitext_103"),
    ),
}
"""The names of the sets in each of the paper's groups, which are OLMo's names."""
SET_FILES: dict[Group, str] = {"v2-small": "v2_small_gptneox20b/{}/val.npy", "v3-small": "v3_small_gptneox20b/{}/val"}
"""The path of a set of each group, with {} for the set's name, as in OLMo's URLs below eval-data/perplexity."""


def set_name(group: Group, name: str) -> str:
    """Return the name of a group's set in OLMo's metrics."""
    return f"{group}-{name}-validation"


@dataclass(frozen=True, kw_only=True)
class PerplexityConfig:
    """Sets of tokens whose perplexity is measured; each file is cut into chunks, as in the paper."""

    sets: dict[str, list[str]] = field(default_factory=dict)
    """Sets by name: prefixes of pairs, `.npy` files, globs, or folders."""
    groups: list[Group] = field(default_factory=list)
    """The paper's groups of sets to measure; their files are in `folder`."""
    folder: str | None = None
    """Folder of the sets of `groups`, as OLMo lays them out (docs/evaluation.md#perplexity-sets)."""
    chunk_tokens: int | None = None
    """Tokens of a chunk, of which all but the first are scored; null: `seq_length`."""
    limit_tokens: int | None = None
    """Number of tokens to take of each set, from its beginning, rounded up to whole chunks; null: all."""
    npy_dtype: NpyType = "uint16"
    """Type of the token ids in `.npy` files without a manifest."""

    @property
    def is_empty(self) -> bool:
        """Return whether the configuration names no set."""
        return not (self.sets or self.groups)

    @property
    def paths(self) -> dict[str, list[str]]:
        """Return each set's paths by the set's name; the sets of groups come first."""
        group_paths = {
            set_name(group, name): [f"{self.folder}/{SET_FILES[group].format(name)}"]
            for group in self.groups
            for name in SETS[group]
        }
        return group_paths | self.sets

    def problems(self) -> list[str]:
        """Return the rules of single fields that this configuration breaks, one line each; no file is looked for."""
        section = "evaluation.perplexity"
        problems = [
            f"{section}.sets: {name!r} is no name of a set; use letters, digits, '.', '_' and '-'"
            for name in self.sets
            if not name or not all(c.isalnum() or c in "._-" for c in name)
        ]
        problems += [
            f"{section}.sets.{name} is empty; name token files" for name, paths in self.sets.items() if not paths
        ]
        if self.groups and self.folder is None:
            problems.append(f"{section}.groups is {', '.join(self.groups)} without a folder; set {section}.folder")
        problems += broken_fields(section, self, "be at least 2, or null", lambda count: count < 2, "chunk_tokens")
        return problems + broken_fields(section, self, "be at least 1, or null", lambda n: n < 1, "limit_tokens")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Tasks and perplexity sets that a run measures as it goes on (docs/evaluation.md#in-the-loop)."""

    requests: str | None = None
    """Request file that `evaluate --prepare` wrote with the tokenizer in `data.tokenizer`."""
    tasks: list[str] = field(default_factory=list)
    """Tasks or groups (`paper`, `olmo-core-8`, `easy`, `mmlu`) of the request file, your own as `own:NAME`; empty: all
    choice tasks of the file."""
    limit: int | None = None
    """Number of documents to take of each task, from its beginning; null: all."""
    interval: int | None = None
    """Steps between evaluations; null: `training.eval_interval`."""
    batch_tokens: int | None = None
    """About how many tokens a micro batch has; null: `micro_batch_size` × `seq_length`."""
    perplexity: PerplexityConfig = field(default_factory=PerplexityConfig)
    """Sets of tokens whose perplexity is measured."""

    @property
    def is_empty(self) -> bool:
        """Return whether the configuration names neither a request file nor sets."""
        return self.requests is None and self.perplexity.is_empty

    def problems(self) -> list[str]:
        """Return the rules of single fields that this configuration breaks, one line each; no file is opened."""
        problems = broken_fields(
            "evaluation", self, "be at least 1, or null", lambda count: count < 1, "limit", "interval", "batch_tokens"
        )
        if self.requests is None:
            problems += [
                f"evaluation.{name} is set without evaluation.requests; name a request file, which `evaluate "
                "--prepare` writes"
                for name in ("tasks", "limit")
                if getattr(self, name)
            ]
        try:
            problems += [
                f"evaluation.tasks has {task.name}, whose answers a model writes; leave it out, and have `evaluate` "
                "score the run's checkpoints on it"
                for task in resolve(self.tasks)
                if task.is_generated
            ]
        except InputError as error:
            problems += [f"evaluation.tasks: {line}" for line in str(error).splitlines()]
        return [*problems, *self.perplexity.problems()]


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """The evaluation that the options of `evaluate` request, checked as far as this is possible without a model."""

    options: EvaluateOptions
    checkpoints: tuple[Path, ...]
    """Checkpoints to evaluate, without duplicates, in the order of the table."""
    evaluation: EvaluationConfig
    """Tasks and sets to evaluate on. `tasks` may have generation tasks; empty: all tasks of the request file."""
    layout: Layout
