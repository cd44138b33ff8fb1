"""The commands of the queue's parts: as on a GPU, and in a rehearsal with sizes that a CPU computes."""

import re
from pathlib import Path

from queueing.record import ROOT, Command, Setting

TESTS = ROOT / "tests" / "gpu"
GLOO = 'runtime.distributed_backend="gloo"'
"""Of a rehearsal: NCCL needs a GPU."""
GRAPHS = 'kernels.cuda_graph_impl="local"'
FOUR = "training.global_batch_size=32"
"""Four micro batches of eight a step."""
CLAIM = {False: ROOT / "examples/sweeps/claim-30m.yaml", True: ROOT / "examples/sweeps/claim-rehearsal.yaml"}
"""The sweep, in earnest and rehearsed."""
JOBS = "4"
"""Cells of it that share the GPU."""

Cases = dict[str, tuple[str, ...]]
"""By a case's name its model and settings."""


def _steps(setting: Setting, output: str, cases: Cases, *options: str) -> Command:
    """Steps of cases in turns, by `tools/bench_steps.py`."""
    on_gpu = ("--device", "cuda", "--preset", "fanformer-1b", "--micro-batch-size", "8", *options)
    small = "--config examples/tiny-cpu.yaml --seq-length 64 --micro-batch-size 1 --steps 1 --warm-up 1 --rounds 1"
    arguments = list(
        setting.pick(on_gpu, ("--device", "cuda", *small.split(), *(["--rates"] if "--rates" in options else [])))
    )
    for name, settings in cases.items():
        own = [each for each in settings if each not in (GRAPHS, FOUR)] + [GLOO]
        arguments += ["--case", name, *setting.pick(settings, own)]
    file = str(setting.folder / output)
    return Command(arguments=["tools/bench_steps.py", *arguments, "--json", file], name=Path(output).stem)


def machine(setting: Setting) -> list[Command]:
    """Check what is installed."""
    arguments = ["tools/queueing/machine.py", str(setting.folder / "machine.json"), *setting.pick([], ["--rehearse"])]
    return [Command(arguments=arguments, name="machine")]


def _pytest(file: Path, *options: str) -> Command:
    """One file of tests; their own conftest imports what a machine for GPU checks need not have."""
    arguments = f"-m pytest {file} --confcutdir=tests/gpu -p no:cacheprovider -v --color=no".split()
    return Command(arguments=[*arguments, *options], name=file.stem, variables={"OMP_NUM_THREADS": "2"})


def new_tests(_setting: Setting) -> list[Command]:
    """Run the tests that no GPU has seen."""
    attention = _pytest(TESTS / "test_transformer_engine.py", "-k", "attention_is_fused or attention_within_documents")
    return [attention, _pytest(TESTS / "test_profiling.py")]


def tests(_setting: Setting) -> list[Command]:
    """Run every file of tests/gpu."""
    return [_pytest(file) for file in sorted(TESTS.glob("test_*.py"))]


ONE_STEP: Cases = {
    "F, graphs": ("fanformer", GRAPHS),
    "T, graphs": ("transformer", GRAPHS),
    "F": ("fanformer",),
    "T": ("transformer",),
}


def step(setting: Setting) -> list[Command]:
    """Time one micro batch a step, with CUDA graphs and without."""
    return [_steps(setting, "step.json", ONE_STEP, "--rates")]


def micro_batches(setting: Setting) -> list[Command]:
    """Time four micro batches a step."""
    cases = {name: (*settings, FOUR) for name, settings in ONE_STEP.items() if GRAPHS in settings}
    return [_steps(setting, "step.json", cases)]


def fp8(setting: Setting) -> list[Command]:
    """Time the recipes of FP8, and the FAN map in it."""
    delayed = (GRAPHS, 'precision.fp8="hybrid"', 'precision.fp8_recipe="delayed"')
    tensorwise = (GRAPHS, 'precision.fp8="hybrid"', 'precision.fp8_recipe="tensorwise"')
    cases = {
        "F, delayed": ("fanformer", *delayed),
        "T, delayed": ("transformer", *delayed),
        "F, tensorwise": ("fanformer", *tensorwise),
        "T, tensorwise": ("transformer", *tensorwise),
        "F, tensorwise, fp8_fan": ("fanformer", *tensorwise, "precision.fp8_fan=true"),
    }
    return [_steps(setting, "step.json", cases)]


def layers_of_7b(setting: Setting) -> list[Command]:
    """Time a few layers of 7B."""
    few = setting.pick("model.num_layers=4", "model.num_layers=2")
    cases = {"F": ("fanformer", few), "T": ("transformer", few)}
    size = "--preset fanformer-7b --micro-batch-size 2 --rates"
    return [_steps(setting, "step.json", cases, *size.split())]


def settings(setting: Setting) -> list[Command]:
    """Time a step by settings of the machine."""
    margins = ("NVTE_FWD_LAYERNORM_SM_MARGIN=20", "NVTE_BWD_LAYERNORM_SM_MARGIN=20")
    fixed = "PYTORCH_ALLOC_CONF=expandable_segments:False"
    cases = {
        "as usual": ("fanformer",),  # one connection, segments that expand
        "32 connections": ("fanformer", "CUDA_DEVICE_MAX_CONNECTIONS=32"),
        "margins of 20": ("fanformer", *margins),
        "fixed segments": ("fanformer", fixed),
        "graphs": ("fanformer", GRAPHS),
        "graphs, fixed segments": ("fanformer", GRAPHS, fixed),
    }
    return [_steps(setting, "step.json", cases)]


def recipe(setting: Setting) -> list[Command]:
    """Time a step by what goes beyond the paper's recipe, four micro batches each."""
    cases = {
        "AdamW": ("fanformer", GRAPHS, FOUR),
        "Muon": ("fanformer", GRAPHS, FOUR, 'optimizer.name="muon"'),
        "norms of heads": ("fanformer", GRAPHS, FOUR, "model.qk_layernorm=true"),
        "z-loss": ("fanformer", GRAPHS, FOUR, "training.z_loss_coefficient=1e-5"),
    }
    return [_steps(setting, "step.json", cases)]


def formats(setting: Setting) -> list[Command]:
    """Time a step by the number formats of moments and of gradients' sums."""
    moments = ('optimizer.exp_avg_dtype="bf16"', 'optimizer.exp_avg_sq_dtype="bf16"')
    cases = {
        "fp32": ("fanformer", GRAPHS),
        "moments in bf16": ("fanformer", GRAPHS, *moments),
        "moments and gradients in bf16": ("fanformer", GRAPHS, *moments, "precision.grad_reduce_in_fp32=false"),
    }
    return [_steps(setting, "step.json", cases)]


def save(setting: Setting) -> list[Command]:
    """Time a checkpoint in the background."""
    small = ("--config", "examples/tiny-cpu.yaml", "--seq-length", "64", "--micro-batch-size", "1", "--device", "cpu")
    size = setting.pick(("--preset", "fanformer-1b", "--device", "cuda"), small)
    return [
        Command(arguments=["tools/bench_async_save.py", *size, "--json", f"{setting.folder}/save.json"], name="save")
    ]


def generation(setting: Setting) -> list[Command]:
    """Time prefill and decoding of one sequence and of 32."""
    commands = []
    for batch, rounds in ((1, 20), (32, 5)):
        name = f"batch-{batch}"
        on_gpu = {"preset": "fanformer-1b", "dtype": "fp16", "prompt_tokens": 4096, "new_tokens": 16, "rounds": rounds}
        small = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "prompt_tokens": 64, "new_tokens": 4, "rounds": 2}
        options = [f"--inference.{key}={value}" for key, value in setting.pick(on_gpu, small).items()]
        arguments = ["-m", "megatron_fanformer", "experiment", "inference", f"--inference.batch_size={batch}"]
        commands.append(Command(arguments=[*arguments, *options, "--output", str(setting.folder / name)], name=name))
    return commands


def fan_activation(setting: Setting) -> list[Command]:
    """Time the FAN kernel."""
    size = setting.pick("--presets fanformer-1b", "--hidden-sizes 256 --tokens 256 --repeats 1")
    arguments = f"tools/bench_fan.py --device cuda {size} --json".split()
    return [Command(arguments=arguments, name="errors", output="fan.jsonl")]


def loss_head(setting: Setting) -> list[Command]:
    """Time the loss heads."""
    on_gpu = "--tokens 16384 --hidden-size 2048 --vocab-size 50304"
    small = "--tokens 1024 --hidden-size 64 --vocab-size 8192 --repeats 1 --distributed-backend gloo"
    arguments = f"tools/bench_loss_head.py --device cuda --dtype bf16 {setting.pick(on_gpu, small)} --json".split()
    return [Command(arguments=arguments, name="errors", output="head.jsonl")]


# -- the science


def claim_folder(setting: Setting) -> Path:
    """Where the claim's text and tokens are, which its sweep's file names."""
    return ROOT / setting.pick("runs/claim", "runs/claim-rehearsal")


def text(setting: Setting) -> list[Command]:
    """Make documents, a tokenizer and tokens of what is installed."""
    folder = claim_folder(setting)
    size = setting.pick("--most-bytes 900M", "--most-bytes 4M --held-out-bytes 200K").split()
    made = ["tools/installed_text.py", str(folder / "text"), "--vocab-size", "8192", *size]
    commands = [Command(arguments=made, name="documents")]
    for part, inputs in (("train", "train-*.jsonl.gz"), ("held-out", "held-out.jsonl.gz")):
        arguments = ["-m", "megatron_fanformer", "prepare", str(folder / "text" / inputs)]
        arguments += [
            "--output",
            str(folder / "tokens" / part),
            "--tokenizer",
            str(folder / "text" / "tokenizer.model"),
        ]
        commands.append(Command(arguments=arguments, name=part))
    return commands


def text_kept(setting: Setting) -> list[Path]:
    """List the manifests of the text and the tokens."""
    folder = claim_folder(setting)
    return [folder / "text" / "manifest.json", *folder.glob("tokens/*.manifest.json")]


def claim(setting: Setting) -> list[Command]:
    """Run the sweep's cells that are not complete."""
    arguments = ["-m", "megatron_fanformer", "sweep", str(CLAIM[setting.rehearses]), "run", "--jobs", JOBS]
    return [Command(arguments=arguments, name="run")]


def claim_report(setting: Setting) -> list[Command]:
    """Report what the sweep's cells show so far."""
    arguments = ["-m", "megatron_fanformer", "sweep", str(CLAIM[setting.rehearses]), "report"]
    return [Command(arguments=arguments, name="report")]


def claim_kept(setting: Setting) -> list[Path]:
    """List the files of the sweep's report."""
    [name] = re.findall(r"^folder: *(\S+)", CLAIM[setting.rehearses].read_text(encoding="utf-8"), re.MULTILINE)
    return [
        path for path in (ROOT / name).glob("*") if path.name in ("result.json", "README.md") or path.suffix == ".png"
    ]
