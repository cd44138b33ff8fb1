"""The run configurations and scripts in examples/."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_fanformer.cli import main
from megatron_fanformer.data.token_files import read_index
from megatron_fanformer.demo.demo import MODEL as DEMO_MODEL
from megatron_fanformer.model.config import PRESETS
from megatron_fanformer.train.config import RunConfig, load_config
from megatron_fanformer.train.metrics import read_metrics
from tests.chat_pairs import random_chats, write_chats
from tests.patience import PATIENCE_SECONDS
from tests.small_runs import ROOT, RunOnRanks, free_port, start_program, write_program, write_tokens
from tests.train.test_config import write_saved_model
from tests.train.test_trainer import train

EXAMPLES = ROOT / "examples"
FINE_TUNING = sorted(EXAMPLES.glob("sft-*.yaml"))
CONFIGS = sorted(set(EXAMPLES.glob("*.yaml")) - {EXAMPLES / "kubernetes-jobset.yaml", *FINE_TUNING})
FINE_TUNED = {"sft-tiny-cpu": DEMO_MODEL, "sft-tulu": PRESETS["fanformer-1b"]}
"""What each fine-tuning example starts from."""
PAPER_SIZES = [name for name in PRESETS if re.fullmatch(r"fanformer-\d+[mb]", name)]


def stated(file: Path, what: str) -> int:
    """A number of the comment at the top."""
    match = re.search(rf"^# {what}: ([\d,]+)", file.read_text(), re.MULTILINE)
    assert match, f"{file.name} does not state its {what.lower()}"
    return int(match[1].replace(",", ""))


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    return write_tokens(tmp_path / "tokens")


def on_data_that_exists(config: RunConfig, tokens: str) -> RunConfig:
    data = dataclasses.replace(
        config.data,
        train_data=[tokens],
        stages={name: [tokens] for name in config.data.stages},
        valid_data={name: [tokens] for name in config.data.valid_data},
        tokenizer=None,
    )
    return dataclasses.replace(config, data=data)


def test_there_is_one_for_each_of_the_papers_sizes_and_a_tiny_one() -> None:
    assert sorted(file.stem for file in CONFIGS) == sorted(
        [*PAPER_SIZES, "tiny-cpu", "fanformer-1b-stages", "long-1b-32k"]
    )
    assert {file.stem for file in FINE_TUNING} == FINE_TUNED.keys()


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_only_its_data_is_missing_and_its_model_has_the_stated_size(file: Path, tokens: str) -> None:
    config = load_config(file)
    data_parallel_size = config.parallel.resolve_data_parallel_size(stated(file, "Ranks"))
    assert on_data_that_exists(config, tokens).problems(data_parallel_size) == []
    assert all("does not exist" in problem for problem in config.problems(data_parallel_size))
    assert config.model.num_parameters == stated(file, "Parameters")


@pytest.mark.parametrize("name", PAPER_SIZES)
def test_a_papers_size_is_its_preset_under_the_papers_recipe(name: str) -> None:
    config = load_config(EXAMPLES / f"{name}.yaml")
    assert config.model == PRESETS[name]
    optimizer, schedule, training = config.optimizer, config.schedule, config.training
    assert (optimizer.lr, optimizer.adam_beta1, optimizer.adam_beta2) == (4e-4, 0.9, 0.95)
    assert (optimizer.adam_eps, optimizer.weight_decay, optimizer.clip_grad) == (1e-5, 0.1, 1.0)
    assert (schedule.lr_decay_style, schedule.lr_warmup_iters, schedule.min_lr) == ("cosine", 2000, 4e-5)
    assert (training.train_iters, training.global_batch_size, config.model.seq_length) == (250_000, 2048, 2048)
    assert config.precision.dtype == "bf16"


@pytest.mark.parametrize("file", FINE_TUNING, ids=lambda file: file.stem)
def test_fine_tuning_lacks_only_its_chats_and_what_it_starts_from(file: Path, tmp_path: Path) -> None:
    base = write_saved_model(tmp_path / "base", FINE_TUNED[file.stem])
    config = load_config(file, ["--checkpoint.load", str(base), "--training.run_dir", str(tmp_path / "run")])
    assert config.model == FINE_TUNED[file.stem]
    assert all("does not exist" in problem for problem in config.problems(stated(file, "Ranks")))
    chats = write_chats(tmp_path / "chats", random_chats(20, vocab_size=100))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, train_data=[chats], tokenizer=None))
    assert config.problems(stated(file, "Ranks")) == []


# -- the scripts


@pytest.mark.full  # two launchers import torch and megatron-core beside two ranks
def test_two_nodes_under_torchrun_learn_what_one_node_does(run_on_ranks: RunOnRanks, tmp_path: Path) -> None:
    """The tiny example for five steps: two launcher agents of one rank each, and two ranks of ours."""
    tokens = write_tokens(tmp_path / "tokens", vocab_size=8192)

    def overrides(run: str) -> list[str]:
        values = {
            "data.train_data": f"[{tokens}]",
            "data.valid_data": f"{{random: [{tokens}]}}",
            "data.tokenizer": "null",
            "model.num_layers": "2",
            "model.seq_length": "32",
            "runtime.cpu_kernels": "torch",  # as the ranks of the tests have it
            "runtime.threads_per_rank": "1",
            "schedule.lr_warmup_iters": "1",
            "training.run_dir": str(tmp_path / run),
            "training.train_iters": "5",
            "training.eval_iters": "1",
        }
        return [part for name, value in values.items() for part in (f"--{name}", value)]

    example = EXAMPLES / "tiny-cpu.yaml"
    arguments = ["--config", str(example), *overrides("nodes")]
    meeting = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NPROC_PER_NODE": "1"}
    command = ["bash", str(EXAMPLES / "torchrun.sh"), *arguments]
    nodes = [start_program(*command, environment={**meeting, "NODE_RANK": str(node)}) for node in (0, 1)]
    for node in nodes:
        _, errors = node.communicate(timeout=PATIENCE_SECONDS)
        assert node.returncode == 0, errors
    run_on_ranks(2, train, load_config(example, [*overrides("ours"), "--runtime.device", "cpu"]).as_dict())

    metrics = {run: read_metrics(tmp_path / run) for run in ("nodes", "ours")}
    assert len(metrics["ours"]) == 5 and "validation_loss/random" in metrics["ours"][-1]
    for name in ("step", "loss", "grad_norm", "validation_loss/random"):
        assert [m.get(name) for m in metrics["nodes"]] == [m.get(name) for m in metrics["ours"]]


SRUN = """
if [[ "$*" == *check_nodes.py* ]]; then
    echo "$*" >> $FOLDER/checks
    exit "$CHECK_CODE"
fi
if [[ "$*" == *" true" ]]; then
    [[ "$*" != *"--nodelist=${LOST:-none},"* ]]
    exit
fi
echo "$MASTER_ADDR $MASTER_PORT $*" >> $FOLDER/srun.calls
exit $(sed -n "$(wc -l < $FOLDER/srun.calls)p" $FOLDER/codes)
"""


def run_slurm_script(
    folder: Path, codes: list[int], *, listed: str = "node-7 node-8 node-9", **variables: str
) -> tuple[int, list[str], list[str]]:
    """Run slurm.sh where Slurm's commands only tell what they are asked; its exit code, srun's words and scontrol's.

    The ranks end with `codes`, one after the other; Slurm gives the job the nodes `listed`.
    """
    (folder / "codes").write_text("".join(f"{code}\n" for code in codes))
    (folder / "srun.calls").touch()
    write_program(folder / "srun", SRUN)
    write_program(folder / "scontrol", f'echo "$*" >> {folder}/scontrol.calls; printf "%s\\n" {listed}')
    # The controller does not answer the first time, and the script waits for it.
    answer = f'[[ -e {folder}/asked ]] && echo "node-[7-9]" || {{ touch {folder}/asked; exit 1; }}'
    write_program(folder / "squeue", answer)
    write_program(folder / "sleep", "")
    environment = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_JOB_ID": "12345",
        "SLURM_NTASKS_PER_NODE": "8",
        "PYTHON": "python",
        "FOLDER": str(folder),
        "CHECK_CODE": "0",
        **variables,
    }
    command = ["bash", EXAMPLES / "slurm.sh", "--config", "a file.yaml"]
    script = subprocess.run(command, env=environment, check=False)
    srun, scontrol = ((folder / name).read_text().splitlines() for name in ("srun.calls", "scontrol.calls"))
    return script.returncode, srun, scontrol


@pytest.mark.parametrize(
    ("codes", "end", "is_requeued"),
    [
        *(([code], code, code == 5) for code in (0, 2, 3, 4, 5)),
        ([1, 137, 0], 0, False),
        ([1, 1, 1, 1], 1, False),
    ],
)
def test_the_slurm_script_joins_the_ranks_requeues_what_stopped_and_restarts_what_failed(
    tmp_path: Path, codes: list[int], end: int, is_requeued: bool
) -> None:
    code, srun, scontrol = run_slurm_script(tmp_path, codes)
    assert code == end and len(srun) == len(codes)
    for line in srun:
        assert line.startswith("node-7 22345 --cpu-bind=none --nodes=3 --nodelist=node-7,node-8,node-9 --ntasks=24 ")
        assert line.endswith("python -m megatron_fanformer train --config a file.yaml")
    assert scontrol == ["show hostnames node-[7-9]"] * len(codes) + ["requeue 12345"] * is_requeued


def test_the_slurm_script_waits_until_slurm_has_noticed_a_lost_node(tmp_path: Path) -> None:
    """It goes on with a spare one, and is requeued without one."""
    code, srun, _ = run_slurm_script(tmp_path, [0], NODES="2", LOST="node-7")
    assert (code, srun) == (1, [])  # here Slurm never does
    code, srun, _ = run_slurm_script(tmp_path, [0], listed="node-8 node-9", NODES="2", LOST="node-7")
    assert code == 0
    assert srun[0].startswith("node-8 22345 --cpu-bind=none --nodes=2 --nodelist=node-8,node-9 --ntasks=16 ")
    (tmp_path / "srun.calls").unlink()
    code, srun, scontrol = run_slurm_script(tmp_path, [0], listed="node-9", NODES="2")
    assert (code, srun, scontrol[-1]) == (5, [], "requeue 12345")


@pytest.mark.parametrize(("check", "end", "trains"), [(0, 0, True), (1, 1, False), (138, 5, False)])
def test_the_slurm_script_checks_all_nodes_first_where_it_is_told_to(
    tmp_path: Path, check: int, end: int, trains: bool
) -> None:
    """A check that the time limit's signal ended is requeued."""
    code, srun, scontrol = run_slurm_script(tmp_path, [0], CHECK="1", CHECK_CODE=str(check), NODES="2")
    assert (code, len(srun), scontrol[-1] == "requeue 12345") == (end, trains, end == 5)
    [checked] = (tmp_path / "checks").read_text().splitlines()
    assert " --nodelist=node-7,node-8,node-9 --ntasks=24 " in checked


@pytest.mark.parametrize(("left", "end"), [(200, 5), (300, 0)])
def test_the_slurm_script_starts_no_step_that_the_signal_of_the_time_limit_would_miss(
    tmp_path: Path, left: int, end: int
) -> None:
    code, srun, scontrol = run_slurm_script(tmp_path, [0], SLURM_JOB_END_TIME=str(int(time.time()) + left))
    assert (code, len(srun), scontrol[-1] == "requeue 12345") == (end, end == 0, end == 5)


def test_the_slurm_script_starts_as_many_ranks_as_a_node_has_gpus_in_a_container(tmp_path: Path) -> None:
    """As Pyxis takes them: the ranks, and not what looks at a node itself."""
    image = f"{tmp_path}/an image.sqsh"
    _, srun, _ = run_slurm_script(tmp_path, [0], GPUS_PER_NODE="4", CONTAINER_IMAGE=image)
    mounts = f"{os.getcwd()}:{os.getcwd()}"
    in_container = f"--container-image={image} --container-workdir={os.getcwd()} --no-container-entrypoint"
    begins = f"node-7 22345 --cpu-bind=none {in_container} --container-mounts={mounts} --nodes=3 "
    assert srun[0].startswith(begins) and "--ntasks=12 --ntasks-per-node=4 " in srun[0]


@pytest.mark.full
def test_a_task_of_an_array_encodes_its_shard(
    tmp_path: Path, olmo_tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dolma").mkdir()
    for number in range(3):
        line = json.dumps({"id": str(number), "text": f"document {number} " * 20})
        (tmp_path / "dolma" / f"{number}.jsonl").write_text(line + "\n")
    lines = (EXAMPLES / "prepare.sh").read_text().splitlines()
    job, merge = [line.removeprefix("#   ") for line in lines if line.startswith("#   ")]
    assert job == "sbatch --array=0-99 examples/prepare.sh 100 dolma data/dolma tokenizer.json"
    words = ["2", "dolma", "data/dolma", olmo_tokenizer_file, "--strict"]
    for task in ("0", "1"):
        environment = {**os.environ, "SLURM_ARRAY_TASK_ID": task, "PYTHON": sys.executable}
        subprocess.run(["bash", EXAMPLES / "prepare.sh", *words], env=environment, check=True, cwd=tmp_path)
    command = merge.replace("tokenizer.json --merge 100", f"{olmo_tokenizer_file} --merge 2 --strict")
    assert main(command.split()[1:]) == 0
    assert len(read_index("data/dolma").lengths) == 3


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.sh")), ids=lambda script: script.name)
def test_the_scripts_pass_shellcheck(script: Path) -> None:
    checked = subprocess.run(["shellcheck", script], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_olmes_gets_the_export_as_a_local_model_and_the_papers_suite(tmp_path: Path) -> None:
    """By a stand-in for the command, which needs the network."""
    message = tmp_path / "message"
    olmes = write_program(tmp_path / "olmes", f'printf "%s\\n" "$@" > {message}')
    (tmp_path / "an export").mkdir()
    command = ["bash", str(EXAMPLES / "olmes.sh"), "an export", "results", "--limit", "10"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "OLMES": str(olmes), "MAX_LENGTH": "512"}, check=True)
    model, results = str(tmp_path / "an export"), str(tmp_path / "results")
    arguments = message.read_text().splitlines()
    assert json.loads(arguments[3]) == {"trust_remote_code": True, "max_length": 512}
    assert arguments[:3] + arguments[4:] == [
        *("--model", model, "--model-args", "--task", "main_suite::olmo1", "--output-dir", results, "--limit", "10")
    ]
