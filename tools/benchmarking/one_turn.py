"""The process of one turn of `tools/bench_steps.py`: imports everything, waits to be let go, takes steps, and ends.

    python -m benchmarking.one_turn REQUEST.json

It writes `ready` once it has imported what takes seconds, waits for a line on standard input, and then writes what it
measured as one line of JSON. Until it is let go, it has nothing on the GPU: many can wait while one measures.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarking.ranks import Rank
from megatron_fanformer.processes import end_with_parent
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.training.config import config_from_dict


def main() -> None:
    """Do what the request says."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a run reports to its user
    request = json.loads(Path(sys.argv[1]).read_text())
    config = config_from_dict(request["values"])
    devices.prepare_megatron(config.run_shape(1), on_cpu=config.runtime.device == "cpu")  # as `train` does
    from megatron_fanformer.model.layer_spec import transformer_engine_problem
    from megatron_fanformer.runtime.parallel import distributed
    from megatron_fanformer.training import trainer  # noqa: F401  takes seconds

    transformer_engine_problem()  # imports the Engine
    print("ready", file=answers, flush=True)
    if not sys.stdin.readline():
        return
    with distributed(config.parallel, None, config.runtime) as grid:
        rank = Rank(config, grid)
        rank.steps(request["warm_up"])
        timing = rank.steps(request["steps"])
        measured = {**asdict(timing), "peak_memory_bytes": rank.peak_memory()}
        rank.trainer.close()
    print(json.dumps(measured), file=answers, flush=True)


if __name__ == "__main__":
    main()
