"""`examples/prepare.sh` on a real Slurm: an array of tasks, one of which loses its node."""

from pathlib import Path

import pytest

from megatron_fanformer.cli import main
from megatron_fanformer.data.manifest import Manifest, read_any_manifest
from tests.clusters.namespaces import wait_until
from tests.clusters.slurm_here import SlurmCluster
from tests.preparation.making import as_line, prepare_files
from tests.preparation.test_interrupted import hashes
from tests.preparation.test_lists import stages
from tests.small_runs import ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

SECONDS = 600.0
LISTS = ("000", "001", "002")


def test_the_list_of_a_lost_node_is_taken_up_by_another_task(
    cluster: SlurmCluster, tmp_path: Path, small_tokenizer_file: Path
) -> None:
    documents, lists, data = tmp_path / "documents", tmp_path / "lists", tmp_path / "data"
    documents.mkdir()
    for number in range(3):
        (documents / f"{number}.jsonl").write_bytes((as_line(f"{number} one two three " * 500) + b"\n") * 2000)
    assert main(["prepare", str(documents), "--lists", "3", "--output", str(lists)]) == 0
    here = ["--array=0-2", "--exclusive", "--cpus-per-task=1", "--mem-per-cpu=0", f"--chdir={tmp_path}"]
    script = [str(ROOT / "examples" / "prepare.sh"), str(lists), str(data / "x"), str(small_tokenizer_file)]
    job = cluster.submit(*here, *script, "--backend", "sentencepiece")  # which takes seconds for a list

    tokens = data / "x-000.parts" / "000000.tokens"
    wait_until(lambda: tokens.exists() and bool(tokens.stat().st_size), SECONDS, "the task did not begin")
    cluster.lose(cluster.run("squeue", "--noheader", "--format=%N", f"--jobs={job}_0"))
    assert not (data / "x-000.manifest.json").exists()
    wait_until(lambda: stages(lists) == ["done"] * 3, SECONDS, "not all lists were done")
    wait_until(lambda: not list(data.glob("*.parts")), SECONDS, "work was left")
    for name in LISTS:
        prepare_files(
            str(tmp_path / "undisturbed" / f"x-{name}"),
            [Path(f"@{lists / name}")],
            small_tokenizer_file,
            backend="sentencepiece",
        )
    assert hashes(data) == hashes(tmp_path / "undisturbed")
    assert main(["prepare", "--merge", str(lists)]) == 0
    merged = read_any_manifest(str(data / "x"))
    assert isinstance(merged, Manifest) and merged.documents == 6000
