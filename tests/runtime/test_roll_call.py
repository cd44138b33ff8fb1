"""Who is missing from a collective, in processes of which one is stopped, hangs, fails or skips it.

Runs of the whole trainer are in tests/faults.
"""

import re
import sys

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.small_runs import free_port, start_program

RANKS = 3
RANK = """
import os, signal, sys, time
import torch, torch.distributed as dist
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.runtime import device as devices, roll_call
from megatron_fanformer.runtime.layout import RuntimeConfig
from megatron_fanformer.runtime.parallel import process_group
fault, is_odd = sys.argv[1], os.environ["RANK"] == "1"
roll_call.ANSWER_SECONDS = 4.0
devices.quieten_libraries()
config = RuntimeConfig(device="cpu", threads_per_rank=1, cpu_kernels="torch", distributed_timeout_minutes=10 / 60)
def hang():
    time.sleep(600)
def fail():
    raise CorruptError("a.bin is damaged")
faults = {"stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hung": hang, "failed": fail, "skipped": lambda: None}
try:
    with process_group(config, devices.rank_address()):
        dist.all_reduce(torch.ones(4))
        if is_odd:
            faults[fault]()
        else:
            dist.all_reduce(torch.ones(4))
        dist.broadcast(torch.ones(4), 0)
except Exception as error:
    print(f"{getattr(error, 'exit_code', 1)} {getattr(error, 'already_reported', False)} {error}", flush=True)
    time.sleep(8)  # as `report_failure` does: the peers are still there
os._exit(0)
"""
LINES = {
    "stopped": r"1 False a collective waits in vain; rank 1: stopped or gone; ranks 0, 2: waiting at .*:\d+ in all_red",
    "hung": r"1 False .*; rank 1: elsewhere, at .*<string>:\d+ in hang; ranks 0, 2: waiting at .*:\d+ in all_reduce",
    "skipped": r"1 False .*; ranks 0, 2: waiting at .*:\d+ in all_reduce, .*; rank 1: waiting at .*:\d+ in broadcast, ",
    "failed": r"3 True rank 1: a.bin is damaged",
}
IN_EVERY_RUN = ("stopped", "skipped")


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.full] * (name not in IN_EVERY_RUN)) for name in LINES]
)
def test_the_missing_rank_is_named_and_where_every_other_one_waits(fault: str) -> None:
    port, ranks = free_port(), []
    for rank in range(RANKS):
        address = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1"}
        environment = {name: str(value) for name, value in {**address, "MASTER_PORT": port}.items()}
        ranks.append(start_program(sys.executable, "-c", RANK, fault, environment=environment))
    printed = [rank.communicate(timeout=PATIENCE_SECONDS)[0] for rank in (ranks[0], ranks[2])]
    ranks[1].kill()
    odd, _ = ranks[1].communicate()
    if fault == "skipped":  # it waits, too, and may be the first to call
        printed.append(odd)
    assert re.search(rf"^{LINES[fault]}", "".join(printed), re.MULTILINE), printed
    others = [line for line in "".join(printed).splitlines() if not re.match(LINES[fault], line)]
    assert all(line.startswith("1 True ") for line in others), others
