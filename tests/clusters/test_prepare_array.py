"""`examples/prepare.sh` on a real Slurm: an array of tasks, one of which loses its node."""

from pathlib import Path

import pytest

from megatron_fanformer.cli import main
from tests.clusters.namespaces import wait_until
from tests.clusters.slurm_here import SlurmCluster
from tests.prepare.making import as_line, prepare_files
from tests.prepare.test_interrupted import hashes
from tests.small_runs import ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

SECONDS = 600.0


def test_a_shard_of_a_lost_node_goes_on_and_the_merge_is_that_of_one_machine(
    cluster: SlurmCluster, tmp_path: Path, small_tokenizer_file: Path
) -> None:
    documents, data = tmp_path / "documents", tmp_path / "data"
    documents.mkdir()
    for number in range(3):
        (documents / f"{number}.jsonl").write_bytes((as_line(f"{number} one two three " * 500) + b"\n") * 2000)
    here = ["--array=0-2", "--exclusive", "--cpus-per-task=1", "--mem-per-cpu=0", f"--chdir={tmp_path}"]
    words = ["3", str(documents), str(data / "x"), str(small_tokenizer_file)]
    script = [str(ROOT / "examples" / "prepare.sh"), *words]
    job = cluster.submit(*here, *script, "--backend", "sentencepiece")  # which takes seconds for a shard

    tokens = data / "x.shard-0-of-3.parts" / "000000.tokens"
    wait_until(lambda: tokens.exists() and bool(tokens.stat().st_size), SECONDS, "the task did not begin")
    cluster.lose(cluster.run("squeue", "--noheader", "--format=%N", f"--jobs={job}_0"))
    wait_until(lambda: len(list(data.glob("*.parts/*.json"))) == 6, SECONDS, "not all shards were done")
    options = ["--tokenizer", str(small_tokenizer_file), "--backend", "sentencepiece"]
    assert main(["prepare", str(documents), "--output", str(data / "x"), *options, "--merge", "3"]) == 0
    prepare_files(str(tmp_path / "one" / "x"), [documents], small_tokenizer_file, backend="sentencepiece")
    assert hashes(data) == hashes(tmp_path / "one")
