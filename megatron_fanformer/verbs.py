"""The verbs of the command line, in the order of its --help: a verb is a record in its own room.

Their modules import slow packages when they run: torch and megatron-core take seconds, and so would every worker
process that imports `__main__` again. Errors in a configuration are reported before they are imported.
"""

from typing import Any

from megatron_fanformer.convert.verb import CONVERT, MERGE
from megatron_fanformer.demo.verb import DEMO
from megatron_fanformer.evaluate.verb import EVALUATE
from megatron_fanformer.experiments.probes.command import EXPERIMENT
from megatron_fanformer.experiments.report.command import REPORT
from megatron_fanformer.experiments.sweeps.verb import SWEEP
from megatron_fanformer.generate.verbs import CHAT, GENERATE
from megatron_fanformer.inspect.verb import INSPECT
from megatron_fanformer.options import Verb
from megatron_fanformer.parity.verb import PARITY
from megatron_fanformer.plan.verb import PLAN
from megatron_fanformer.prepare.verb import PREPARE
from megatron_fanformer.train.verbs import CONFIG, TRAIN

ALL: tuple[Verb[Any], ...] = (
    *(DEMO, PREPARE, TRAIN, CONFIG, PARITY, PLAN, EVALUATE),
    *(SWEEP, REPORT, GENERATE, CHAT, EXPERIMENT, INSPECT, CONVERT, MERGE),
)
VERBS = {verb.name: verb for verb in ALL}
REMOVED = {"check-node": "start examples/check_nodes.py by torchrun or srun, a process for each GPU"}
