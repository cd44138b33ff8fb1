"""Two hosts with a cable between them, each with its own torchrun: a slow rank is named, and so is a slow cable."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_fanformer.training.metrics import read_metrics
from tests.clusters.namespaces import Namespaces
from tests.small_runs import ROOT, small_run, write_config, write_tokens

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800), pytest.mark.usefixtures("needs_namespaces")]

SECONDS = 900
SETUP = """
cp /etc/hosts {folder}/hosts
printf '10.98.0.1 host0\\n10.98.0.2 host1\\n' >> {folder}/hosts
mount --bind {folder}/hosts /etc/hosts
hostname host0
ip link set lo up
unshare --net --uts bash -c 'hostname host1; ip link set lo up; touch {folder}/up; exec sleep infinity' > /dev/null &
other=$!
until [[ -e {folder}/up ]]; do sleep 0.1; done
ip link add cable0 type veth peer name cable1 netns $other
ip address add 10.98.0.1/24 dev cable0
ip link set cable0 up
nsenter --target=$other --net bash -c 'ip address add 10.98.0.2/24 dev cable1; ip link set cable1 up'
echo $other > {folder}/other
"""


class Hosts(Namespaces):
    """`host0`, and `host1` within it."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        super().__init__(SETUP.format(folder=folder), environment)

    def start_on(self, host: int, *command: str, **environment: str) -> "subprocess.Popen[str]":
        """Start a program on a host."""
        enter = ["nsenter", f"--target={(self._folder / 'other').read_text().strip()}", "--net", "--uts"]
        own = {"GLOO_SOCKET_IFNAME": f"cable{host}", "NNODES": "2", "NODE_RANK": str(host), "MASTER_ADDR": "host0"}
        return self.start(*(enter if host else []), *command, environment={**own, **environment})


@pytest.fixture
def hosts(program_environment: dict[str, str], tmp_path: Path) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path, program_environment)
    with hosts:
        yield hosts


def outputs_of(nodes: "list[subprocess.Popen[str]]") -> list[tuple[str, str]]:
    return [node.communicate(timeout=SECONDS) for node in nodes]


SLOW = """
# Imported by every Python of the slow host: what it does between two calls of a module takes five times as long.
# (A process that is stopped from outside is stopped within collectives, too, and there it looks like one that waits.)
import time
from torch.nn.modules.module import register_module_forward_pre_hook

last = time.perf_counter()

def dawdle(*_):
    global last
    time.sleep(min(0.2, 4 * (time.perf_counter() - last)))
    last = time.perf_counter()

register_module_forward_pre_hook(dawdle)
"""


def test_the_rank_of_the_slow_host_is_named(hosts: Hosts, tmp_path: Path) -> None:
    values = small_run(
        write_tokens(tmp_path / "tokens"),
        tmp_path / "run",
        training={"train_iters": 60},
        logging={"straggler_interval": 20},
    )
    train = ("bash", str(ROOT / "examples" / "torchrun.sh"), "--config", str(write_config(tmp_path / "c.yaml", values)))
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW)
    slow = {"PYTHONPATH": f"{tmp_path / 'slow'}:{hosts.environment['PYTHONPATH']}"}
    nodes = [hosts.start_on(host, *train, NPROC_PER_NODE="1", **(slow if host else {})) for host in (0, 1)]
    outputs = outputs_of(nodes)
    assert [node.returncode for node in nodes] == [0, 0], outputs
    reports = {metrics["step"]: metrics for metrics in read_metrics(tmp_path / "run") if "slowest_rank" in metrics}
    assert list(reports) == [20, 40, 60]
    for step, report in reports.items():
        assert report["slowest_rank"] == 1, reports
        assert f"step {step}  rank 1 on host1 holds up the others: " in outputs[0][0], (outputs, reports)


def test_a_slow_cable_is_measured(hosts: Hosts) -> None:
    torchrun = (hosts.environment["PYTHON"], "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1")
    script = ("--master-addr=host0", "--master-port=29500", str(ROOT / "examples" / "check_nodes.py"))

    def rate() -> float:
        nodes = [
            hosts.start_on(host, *torchrun, f"--node-rank={host}", *script, "--tolerance", "0.001") for host in (0, 1)
        ]
        outputs = outputs_of(nodes)
        assert [node.returncode for node in nodes] == [0, 0], outputs
        _, *rows = outputs[0][0].splitlines()
        assert [row.split()[0] for row in rows] == ["host0", "host1"]
        return min(float(row.split()[-1]) for row in rows)  # GB/s

    assert rate() > 0.02
    hosts.run("tc", "qdisc", "add", "dev", "cable0", "root", "tbf", "rate", "80mbit", "burst", "64kb", "latency", "1s")
    assert rate() < 0.01
