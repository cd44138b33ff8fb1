"""`config --from-megatron`: a launch script of Megatron-LM as a configuration, and what it does not hold."""

import argparse
import contextlib
import dataclasses
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_fanformer.cli import PROGRAM, main
from megatron_fanformer.configuration import yaml_value
from megatron_fanformer.convert.megatron_names import plain
from megatron_fanformer.train import megatron_arguments
from megatron_fanformer.train.config import config_from_dict, load_config
from megatron_fanformer.train.megatron_arguments import (
    DEFAULTS,
    FP8_DEFAULTS,
    MODEL_DEFAULTS,
    SAME_NAMES,
)
from tests.small_runs import ROOT
from tests.stock_megatron import HAS_TRAINING


def convert(line: str) -> megatron_arguments.Converted:
    return megatron_arguments.convert(shlex.split(line.replace("\\\n", "")))


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "run.yaml"
    command = ["config", "--output", str(output), "--from-megatron", "--num-layers", "2", "--model.vocab_size=8"]
    assert main(command) == 0
    before = output.read_text()
    assert yaml_value(before)["model"]["vocab_size"] == 8
    capsys.readouterr()
    assert main(command) == 2
    assert capsys.readouterr().err == f"{PROGRAM}: {output} exists already; name another file, or remove it\n"
    assert output.read_text() == before
    assert main(["config", *command[3:]]) == 0
    assert capsys.readouterr().out == before


def test_the_page_turns_its_script_into_its_file(tmp_path: Path) -> None:
    """The shell computes what it computes: the page's command line, with variables, in the place of its program."""
    page = (ROOT / "docs" / "from-megatron-lm.md").read_text()
    (line,) = re.findall(r"```\n(torchrun .*? pretrain_gpt.py .*?)\n```", page, re.DOTALL)
    (file,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (command,) = re.findall(r"`(megatron-fanformer config --output run.yaml --from-megatron)`", page)
    command = command.replace("megatron-fanformer", f"{sys.executable} -m megatron_fanformer")
    arguments = line.partition("pretrain_gpt.py")[2].replace(
        "--global-batch-size 512", "--global-batch-size $((8 * 64))"
    )
    script = f"{command} {arguments.replace('runs/a', chr(34) + '$1' + chr(34))} --log-progress 2>&1 | tee log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", script, "script", "runs/a"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[0] == "wrote run.yaml"
    assert done.stdout.splitlines()[-1] == "- --log-progress: no field here"
    theirs, ours = (
        load_config(tmp_path / "run.yaml", ["--model.vocab_size", "50280"]),
        config_from_dict(yaml_value(file)),
    )
    on = dataclasses.replace(ours.parallel, overlap_grad_reduce=True, overlap_param_gather=True)
    assert theirs == dataclasses.replace(ours, parallel=on)  # which null turns on by itself, on GPUs


ROWS_OF_256 = {"make_vocab_size_divisible_by": 256}


@pytest.mark.parametrize(
    ("arguments", "section", "expected"),
    [
        ("--num-query-groups 2", "model", {"num_query_groups": None}),  # 1, Megatron's default, would have no effect
        ("--group-query-attention", "model", {"num_query_groups": 1}),
        ("--hidden-size 1024 --swiglu", "model", {"ffn_hidden_size": 2688}),
        ("--tokenizer-type GPT2BPETokenizer", "model", {"vocab_size": None}),
        ("--spec megatron_fanformer.model.layer_spec fanformer_layer_spec", "model", {"fan": None}),
        ("--tensor-model-parallel-size 4", "model", {"make_vocab_size_divisible_by": 512}),
        ("--tensor-model-parallel-size 4 --make-vocab-size-divisible-by 64", "model", ROWS_OF_256),
        ("--rotary-seq-len-interpolation-factor 4", "model", {"rope_scaling": {"rope_type": "linear", "factor": 4}}),
        ("--num-layers 010 --hidden-size +64", "model", {"num_layers": 10, "hidden_size": 64}),  # YAML's octal
        ("--lr 1e-3 --adam-eps .5e-8", "optimizer", {"lr": 0.001, "adam_eps": 5e-9}),
        ("--cross-entropy-loss-fusion", "kernels", {"chunked_loss_head": True}),
        ("--train-samples 1953125 --global-batch-size 128", "training", {"train_iters": 15258}),
        ("--load here --save here", "checkpoint", {"load": None}),
        ("--fp8-format e4m3", "precision", {"fp8": "e4m3", "fp8_recipe": "delayed", "fp8_amax_history_len": 1}),
        ("--seed 3", "optimizer", {"adam_beta2": 0.999, "adam_eps": 1e-8, "weight_decay": 0.01}),
        ("--optimizer adam", "optimizer", {"name": "adamw"}),
        ("--data-path '0.5 a 0.5 b'", "data", {"train_data": ["0.5", "a", "0.5", "b"], "split": "969,30,1"}),
        ("--data-path a --split \"'99, 1, 0'\"", "data", {"split": "99,1,0"}),  # quotes in an array, as in its scripts
        ("--data-args-path blend.txt", "data", {"train_data": ["@blend.txt"]}),
        ("--train-data-path a --valid-data-path b", "data", {"valid_data": {"valid": ["b"]}, "split": None}),
        ("--recompute-activations", "parallel", {"recompute_granularity": "selective"}),
        ("--iterations-to-skip 3 4", "recovery", {"iterations_to_skip": [3, 4]}),
        ("--seed=3 --seed 4", "training", {"seed": 4}),
    ],
)
def test_values_that_need_converting(arguments: str, section: str, expected: dict[str, Any]) -> None:
    values = yaml_value(convert(arguments).text()).get(section, {})
    assert {name: values.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "title", "note"),
    [
        ("--disable-bias-linear", "Another model than there", "swiglu is False, but every MLP is a SwiGLU"),
        ("--multi-latent-attention", "Another model than there", "is True, but attention is multi-head or grouped-q"),
        ("--spec mine layers", "Another model than there", "--spec mine layers is code, and not read"),
        ("--num-layers 1:30", "Not carried over", 'model.num_layers is "1:30"; it must be an integer'),
        ("--lr nan", "Not carried over", "optimizer.lr is NaN; it must be a finite number"),
        ("--optimizer sgd", "Not carried over", "--optimizer sgd: optimizer.name has no such value"),
        ("--lr-decay-style inverse-square-root", "Not carried over", "it must be one of cosine, linear, constant, WSD"),
        ("--train-samples 80 --rampup-batch-size 1 1 8 --global-batch-size 8", "Not carried over", "by a single --"),
        ("--load there --save here", "Not carried over", "--load there: checkpoint.load (after `convert`; weights"),
        ("--ddp-num-buckets 4", "Not carried over", "parallel.ddp_bucket_size (parameters per bucket"),
        ("--fp16", "Not carried over", "precision.dtype (bf16, which needs no loss scale) is for you to state"),
        ("--title 'a\nseed: 3'", "Not carried over", "--title a seed: 3: no field here"),
    ],
)
def test_what_does_not_carry_over_is_listed(arguments: str, title: str, note: str) -> None:
    found = convert(arguments)
    assert any(note in line for line in found.notes[title]), found.notes
    assert yaml_value(found.text()) == yaml.safe_load(yaml.safe_dump(yaml_value(found.text())))
    assert all(line.startswith("#") for line in found.text().partition("\n\n")[0].splitlines())


# -- the tables


@pytest.mark.full
@pytest.mark.skipif(not HAS_TRAINING, reason="megatron.training comes with megatron-core 0.19")
def test_defaults_are_megatrons_own() -> None:
    from megatron.training.arguments import add_megatron_arguments

    with contextlib.redirect_stdout(io.StringIO()):
        parser = add_megatron_arguments(argparse.ArgumentParser())
    defaults = {plain(name): value for name, value in {**DEFAULTS, **FP8_DEFAULTS}.items() if name != "precision.dtype"}
    assert {name: parser.get_default(name) for name in defaults} == defaults and defaults.keys() <= SAME_NAMES.keys()
    of_model = {name: parser.get_default(name) for name in MODEL_DEFAULTS}
    assert {**of_model, "norm_epsilon": 1e-5} == MODEL_DEFAULTS and of_model["norm_epsilon"] in (None, 1e-5)
