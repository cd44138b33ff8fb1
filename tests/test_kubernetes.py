"""`examples/kubernetes-jobset.yaml`: its names agree, and its shell starts and ends ranks."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.patience import PATIENCE_SECONDS, wait_until
from tests.small_runs import ROOT, write_program

MANIFEST = ROOT / "examples" / "kubernetes-jobset.yaml"


@pytest.fixture
def manifest() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())
    return loaded


def parts(manifest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its job and its pods."""
    [replicated] = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    return job, job["template"]["spec"]


def test_its_names_and_numbers_agree(manifest: dict[str, Any]) -> None:
    job, pod = parts(manifest)
    name, replicated = manifest["metadata"]["name"], manifest["spec"]["replicatedJobs"][0]["name"]
    [check], [ranks] = pod["initContainers"], pod["containers"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    environment = {entry["name"]: entry["value"] for entry in ranks["env"]}
    assert environment["MASTER_ADDR"] == f"{name}-{replicated}-0-0.{name}"  # job 0, pod 0, its subdomain
    assert environment["WORLD_SIZE"] == str(job["parallelism"]) == str(job["completions"])
    for container in (check, ranks):
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    gpus = ranks["resources"]["limits"]["nvidia.com/gpu"]
    assert f"gpus={gpus} " in ranks["command"][2] and f"--nproc-per-node {gpus} " in check["args"][0]
    [labels] = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert list(labels["labelSelector"]["matchLabels"].values()) == [name]


def test_exit_codes_mean_what_they_do_elsewhere(manifest: dict[str, Any]) -> None:
    job, pod = parts(manifest)
    rules = [rule for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    actions = {code: rule["action"] for rule in rules for code in rule["onExitCodes"]["values"]}
    assert actions == {2: "FailJob", 3: "FailJob", 4: "FailJob", 5: "Ignore"}
    assert {rule["onExitCodes"]["containerName"] for rule in rules} == {pod["containers"][0]["name"]}
    [ends] = manifest["spec"]["failurePolicy"]["rules"]
    assert (ends["action"], ends["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


STAND_IN = """
echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $*" >> {folder}/lines
trap 'echo "$RANK" >> {folder}/stopped; exit 5' TERM
case $(sed -n "$((LOCAL_RANK + 1))p" {folder}/codes) in
    waits) for _ in {{1..600}}; do sleep 0.1; done ;;
    *) exit "$(sed -n "$((LOCAL_RANK + 1))p" {folder}/codes)" ;;
esac
"""


def start_pod(manifest: dict[str, Any], folder: Path, ends: list[str]) -> "subprocess.Popen[bytes]":
    """The container of node 3, with an interpreter whose ranks end as given."""
    _, pod = parts(manifest)
    [ranks] = pod["containers"]
    (folder / "codes").write_text("\n".join(ends) + "\n")
    write_program(folder / "python3", STAND_IN.format(folder=folder))
    environment = {entry["name"]: entry["value"] for entry in ranks["env"]}
    environment |= {"JOB_COMPLETION_INDEX": "3", "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.Popen([*ranks["command"], *ranks["args"]], env=environment)


@pytest.mark.parametrize(("ends", "code"), [(["0"] * 8, 0), (["0", "3", "1"] + ["0"] * 5, 3)])
def test_a_pod_starts_its_ranks_and_ends_with_their_highest_code(
    manifest: dict[str, Any], ends: list[str], code: int, tmp_path: Path
) -> None:
    pod = start_pod(manifest, tmp_path, ends)
    assert pod.wait(timeout=PATIENCE_SECONDS) == code
    lines = sorted((tmp_path / "lines").read_text().splitlines())
    command = "-m megatron_fanformer train --config /runs/fanformer-1b.yaml"
    assert lines == [f"{24 + gpu}/64 {gpu}/8 {command}" for gpu in range(8)]


def test_a_pod_passes_its_end_on_and_tells_that_the_ranks_stopped(manifest: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "lines").touch()
    pod = start_pod(manifest, tmp_path, ["waits"] * 8)
    wait_until(lambda: (tmp_path / "lines").read_text().count("\n") == 8)
    time.sleep(0.2)
    pod.terminate()
    assert pod.wait(timeout=PATIENCE_SECONDS) == 5
    assert sorted((tmp_path / "stopped").read_text().split()) == [str(24 + gpu) for gpu in range(8)]
