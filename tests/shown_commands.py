"""The commands and the Python that the documentation shows, and what becomes of each in the tests.

A command of ours is run as it is written, unless `NOT_RUN` says what it needs: then it is checked, as far as its words
go. A line without one is of the programs in `NOT_OURS`. What is in none of these fails a test. A block of Python is
run, unless `PYTHON_NOT_RUN` says what it needs.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from megatron_fanformer.options import PROGRAM
from tests.small_runs import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
READERS_OWN = "run.yaml"
"""A configuration that the reader has."""
TRAIN_SCRIPTS = ("examples/torchrun.sh", "examples/slurm.sh")
"""Their arguments are those of `train`."""

NOT_RUN = {
    "examples/torchrun.sh": "GPUs",
    "NNODES=": "several nodes",
    "sbatch": "Slurm",
    f"{PROGRAM} train --config {READERS_OWN}": "a configuration of the reader's own",
    f"{PROGRAM} train --config examples/tiny-cpu.yaml --training.run_dir runs/trunk": "twice the demo's time",
    f"{PROGRAM} train --config examples/tiny-cpu.yaml --training.run_dir runs/decay": "a checkpoint of runs/trunk",
    f"{PROGRAM} merge runs/trunk": "runs/trunk",
    f"{PROGRAM} merge runs/decay": "runs/decay",
    f"{PROGRAM} prepare chats/": "chats",
    f"{PROGRAM} chat": "a model that was fine-tuned on chats",
    "cat questions.txt": "a model that was fine-tuned on chats",
    f"{PROGRAM} convert FANformer-1B": "the authors' checkpoint",
    f"{PROGRAM} convert runs/fanformer-1b-released": "the authors' checkpoint",
    f"{PROGRAM} convert merged-folder": "a model that another library has fine-tuned",
    f"{PROGRAM} evaluate --prepare": "the tasks' data",
    f"{PROGRAM} evaluate runs/a": "runs of the reader's own",
    f"{PROGRAM} evaluate --compare": "runs of the reader's own",
    f"{PROGRAM} sweep examples/sweeps/p.yaml run": "hours",
    f"{PROGRAM} sweep examples/sweeps/p.yaml report": "hours: that sweep's runs",
    f"{PROGRAM} sweep examples/sweeps/variants-paper.yaml run": "Slurm, and the paper's data",
    f"{PROGRAM} report runs/sweeps": "hours: a sweep's runs",
    f"{PROGRAM} report compare": "hours: a sweep's runs",
    f"{PROGRAM} experiment mod": "a quarter of an hour and more",
    f"{PROGRAM} experiment holes": "hours",
}
"""How a command begins, and what it needs that no test has."""

PYTHON_NOT_RUN = {
    "class MLPInput(Placement)": "the rest of a placement: tests/model/toy_placement.py is one",
    "class Momentum(AdamW)": "the rest of an optimizer: tests/train/test_optimizer.py has one",
    "import torch\nfrom peft": "peft: tests/hf/test_adapters.py does the same",
    "BitsAndBytesConfig(": "three libraries: tests/hf/test_tools.py does the same",
}
"""How a block of Python begins, and what it needs that not every test has."""

NOT_OURS = {
    "mkdir": "makes the folder of a copied checkpoint",
    "cp": "copies a checkpoint of a run that the page has trained",
    "make": "starts the tests, and the demo, which the documentation starts without it, too",
    ".venv/bin/python": "pytest on a part of the tests",
    ".venv-vllm/bin/pip": "the package registry, for another tool's own environment",
    "python3.11": "makes that environment",
    "python": "a tool of some hours: tests/tools has its tests",
    "kubectl": "a cluster: tests/test_kubernetes.py checks the file",
    "sbatch": "Slurm: tests/test_examples.py runs the scripts",
    "srun": "Slurm",
    "torchrun": "GPUs, or Megatron-LM's own program",
    "tensorboard": "a server",
    "pip": "the package registry, for what other tools need",
    "curl": "a server",
}
"""Programs that stand alone in a command, and why no test runs them from the page."""


@dataclass(frozen=True)
class Shown:
    """A command of a page, on one line and without its comment; or a block of Python."""

    page: str
    text: str
    is_python: bool = False

    def __str__(self) -> str:
        return f"{self.page}: {self.text[:60]}"

    @property
    def programs(self) -> list[list[str]]:
        """The words of each program of the line; variables before it and files after an arrow are left out."""
        lexer = shlex.shlex(self.text, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        found: list[list[str]] = [[]]
        words = iter(lexer)
        for word in words:
            if word in ("<", ">", ">>"):
                next(words)
            elif set(word) <= set("();|&"):
                found.append([])
            elif found[-1] or not re.match(r"[A-Z_]+=", word):
                found[-1].append(word)
        return found

    @property
    def ours(self) -> list[list[str]]:
        """The arguments of our command, wherever it stands in the line."""
        return [arguments for words in self.programs if (arguments := _ours(words)) is not None]

    @property
    def needs(self) -> str | None:
        """What keeps it from being run; None where nothing does."""
        reasons = PYTHON_NOT_RUN if self.is_python else NOT_RUN
        return next((reason for beginning, reason in reasons.items() if self.text.startswith(beginning)), None)


def _ours(words: list[str]) -> list[str] | None:
    for place, word in enumerate(words):
        if word == PROGRAM or words[max(0, place - 1) : place + 1] == ["-m", "megatron_fanformer"]:
            return words[place + 1 :]
        if word in TRAIN_SCRIPTS:
            return ["train", *words[place + 1 :]]
    return None


def _of_page(page: Path) -> list[Shown]:
    name = str(page.relative_to(ROOT))
    found: list[Shown] = []
    for language, block in re.findall(r"^```(bash|sh|python)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        if language == "python":
            found.append(Shown(name, block, is_python=True))
            continue
        lines = block.replace("\\\n", " ").splitlines()
        commands = [" ".join(re.sub(r"(^|\s+)#\s.*", "", line).split()) for line in lines]
        found += [Shown(name, command) for command in commands if command]
    return found


SHOWN = [shown for page in PAGES for shown in _of_page(page)]
COMMANDS = [shown for shown in SHOWN if not shown.is_python]
PYTHON = [shown for shown in SHOWN if shown.is_python]
TO_RUN = [shown for shown in SHOWN if (shown.is_python or shown.ours) and shown.needs is None]
