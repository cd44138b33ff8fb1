"""A Slurm cluster on this machine: Debian's packages, unpacked and not installed, a controller and three nodes.

Its mounts, processes, network and host names are in namespaces of their own, which needs root, util-linux and iproute2;
all ends with their first process. It authenticates nobody.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.patience import PATIENCE_SECONDS, wait_until

KINDS = ("--mount", "--pid", "--net", "--uts")
READY = "ready"


def missing() -> str | None:
    """Return why there can be no namespaces here; None if there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    tried = subprocess.run(["unshare", *KINDS, "--fork", "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"unshare fails here ({tried.stderr.strip()})"


class Namespaces:
    """A machine inside this one, while the block lasts: it is there when the shell commands of `setup` are done."""

    def __init__(self, setup: str, environment: dict[str, str]) -> None:
        self.environment = {**os.environ, **environment}
        script = f"set -e\nmount --make-rprivate /\n{setup}\necho {READY}\nexec sleep infinity"
        self._outer = subprocess.Popen(
            ["unshare", *KINDS, "--fork", "--kill-child", "--mount-proc", "bash", "-c", script],
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> "Namespaces":
        assert self._outer.stdout is not None
        while (line := self._outer.stdout.readline().strip()) != READY:
            assert line or self._outer.poll() is None, "the machine was not set up"
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        self._first = children.read_text().split()[0]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._outer.kill()  # --kill-child: the first process ends too, and with it all others
        self._outer.wait()

    def start(self, *command: str, environment: dict[str, str] | None = None) -> "subprocess.Popen[str]":
        """Start a program there, its output captured."""
        return subprocess.Popen(
            ["nsenter", f"--target={self._first}", *KINDS, f"--wd={Path.cwd()}", *command],
            env={**self.environment, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str) -> str:
        """What a program there prints."""
        process = self.start(*command)
        printed, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, (command, printed, errors)
        return printed.strip()

    def processes(self, words: Sequence[str]) -> list[int]:
        """Those there with all of some words in their command line or their environment, by their numbers outside."""
        found = []
        inside = os.readlink(f"/proc/{self._first}/ns/pid")
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdecimal() or os.readlink(entry / "ns/pid") != inside:
                    continue
                parts = b"".join((entry / name).read_bytes() for name in ("cmdline", "environ")).split(b"\0")
            except OSError:  # it has just ended
                continue
            if all(word.encode() in parts for word in words):
                found.append(int(entry.name))
        return found


PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libhwloc15")
NODES = 3
START_SECONDS = 120

CONFIGURATION = """
ClusterName=here
SlurmctldHost=node0
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
PluginDir={libraries}/slurm-wlm
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SchedulerType=sched/builtin
ReturnToService=2
SlurmdTimeout=20
SlurmdParameters=config_overrides
NodeName=node[0-2] Port=[17000-17002] CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
SETUP = """
cp /etc/hosts {folder}/hosts
ip link set lo up
hostname node0
mkdir {folder}/state
for node in 0 1 2; do
    echo 10.99.0.1$node node$node >> {folder}/hosts
    ip address add 10.99.0.1$node/24 dev lo
    mkdir {folder}/spool-node$node
done
mount --bind {folder}/hosts /etc/hosts
{programs}/slurmctld-wlm -D -i > {folder}/slurmctld.out 2>&1 &
for node in 0 1 2; do
    {programs}/slurmd-wlm -D -N node$node -d {programs}/slurmstepd-wlm > {folder}/slurmd$node.out 2>&1 &
done
"""


def unpack(folder: Path) -> str | None:
    """Fetch and unpack the packages; why they cannot be had, or None."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return "Slurm's packages are fetched by apt-get and unpacked by dpkg"
    fetch = ["apt-get", "download", *PACKAGES]
    fetched = subprocess.run(fetch, cwd=folder, capture_output=True, text=True, check=False)
    if fetched.returncode != 0:
        return f"Slurm's packages cannot be had here ({fetched.stderr.strip().splitlines()[-1]})"
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, folder], check=True)
    if not list(folder.glob("usr/lib/*/slurm-wlm/auth_none.so")):
        return "this Slurm has no auth/none"
    return None


class SlurmCluster(Namespaces):
    """A cluster with the nodes node0, node1 and node2, of `unpack`'s packages; the controller is on node0."""

    def __init__(self, packages: Path, folder: Path, environment: dict[str, str]) -> None:
        libraries = next(packages.glob("usr/lib/*/slurm-wlm")).parent
        (folder / "slurm.conf").write_text(CONFIGURATION.format(libraries=libraries, folder=folder))
        super().__init__(
            SETUP.format(folder=folder, programs=packages / "usr/sbin"),
            {
                **environment,
                "SLURM_CONF": str(folder / "slurm.conf"),
                "LD_LIBRARY_PATH": f"{libraries}:{libraries}/slurm-wlm",
                "PATH": f"{packages}/usr/bin:{environment['PATH']}",
            },
        )

    def __enter__(self) -> "SlurmCluster":
        super().__enter__()
        idle = ("sinfo", "--noheader", "--states=idle", "--format=%D")
        wait_until(lambda: self._asked(*idle) == str(NODES), seconds=START_SECONDS)
        return self

    def _asked(self, *command: str) -> str:
        return self.start(*command).communicate(timeout=PATIENCE_SECONDS)[0].strip()

    def submit(self, *words: str) -> str:
        """The number of a new job."""
        return self.run("sbatch", "--parsable", *words)

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job."""
        message = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(word.partition("=")[::2] for word in message.split() if "=" in word)

    def signal(self, number: str) -> None:
        """To all ranks of a job, as `#SBATCH --signal` does before the time limit."""
        self.run("scancel", "--signal=USR1", number)
