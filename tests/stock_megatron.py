"""Stock Megatron-LM's way from its command line to a model, for tests of our specs in it.

megatron-core 0.19 brings `megatron.training`: there the flags go through Megatron's own parser and model builder, as
in its `pretrain_gpt.py`. 0.16 comes without; there the arguments are put together by hand, as `pretrain_gpt.py` and
`gpt_builders.py` of that Megatron-LM do from the same flags, and `configuration_by_hand` is held against the parser
where there is one.
"""

import argparse
import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import import_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.runtime.parallel import ParallelConfig

HAS_TRAINING = importlib.util.find_spec("megatron.training") is not None

SPEC = ["megatron_fanformer.model.layer_spec", "fanformer_layer_spec"]
STACK_SPEC = ["megatron_fanformer.model.hybrid_spec", "fanformer_stack_spec"]  # of a HybridModel
# What goes with the spec, as the documentation says: a FANformer is more than its attention.
ARCHITECTURE = [
    *("--normalization", "RMSNorm"),
    *("--norm-epsilon", "1e-6"),
    "--swiglu",
    "--disable-bias-linear",
    *("--position-embedding-type", "rope"),
    *("--hidden-dropout", "0"),
    *("--attention-dropout", "0"),
]
# What turns off those of Megatron's defaults that need Transformer Engine, and the one that needs apex's kernel.
WITHOUT_ENGINE = [*("--transformer-impl", "local"), "--no-rope-fusion", "--no-persist-layer-norm"]
WITHOUT_APEX = ["--no-gradient-accumulation-fusion"]

ROOT = Path(__file__).parents[1]
LOGGED_LOSS = re.compile(r"iteration +(\d+)/.*lm loss: (\S+)")


def command_line(
    model: FANformerConfig, parallel: ParallelConfig, spec: list[str], *, has_engine: bool = False
) -> list[str]:
    """The flags of `pretrain_gpt.py` for a model in a layout, on a machine without apex (and Transformer Engine)."""
    sizes = {
        "num-layers": model.num_layers,  # a pattern's length comes before it
        "hidden-size": model.hidden_size,
        "ffn-hidden-size": model.ffn_hidden_size,
        "num-attention-heads": model.num_attention_heads,
        "seq-length": model.seq_length,
        "max-position-embeddings": model.seq_length,
        "rotary-base": model.rotary_base,
        "vocab-size": model.vocab_size,
        "tensor-model-parallel-size": parallel.tensor_model_parallel_size,
        "micro-batch-size": 1,
    }
    flags = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    if spec == STACK_SPEC:
        flags += ["--hybrid-layer-pattern", "*-" * model.num_layers]
    if model.num_query_groups:
        flags += ["--group-query-attention", "--num-query-groups", str(model.num_query_groups)]
    if model.untie_embeddings_and_output_weights:
        flags.append("--untie-embeddings-and-output-weights")
    if model.qk_layernorm:
        flags.append("--qk-layernorm")
    if parallel.sequence_parallel:
        flags.append("--sequence-parallel")
    if not has_engine:
        flags += WITHOUT_ENGINE
    return [*flags, "--tokenizer-type", "NullTokenizer", *ARCHITECTURE, *WITHOUT_APEX, "--spec", *spec]


def parsed_arguments(flags: list[str], world_size: int) -> Any:
    """The flags through Megatron's own parser and checks, which print them all and ask a GPU for its age."""
    from megatron.training import arguments

    environment = {"RANK": "0", "WORLD_SIZE": str(world_size), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch("sys.argv", ["pretrain_gpt.py", *flags]),
        mock.patch.object(arguments, "get_device_arch_version", lambda: 9),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        args = arguments.parse_args()
        arguments.validate_args(args, {})
    return args


def pretrain(flags: list[str], environment: Mapping[str, str], *, ranks: int = 1) -> dict[int, float]:
    """Losses by step of Megatron's own training loop (tests/gpu/pretrain_stock.py), by its log, in a process a rank."""
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank-{rank}.log" for rank in range(ranks)]
        command = [
            *(sys.executable, "-m", "tests.gpu.pretrain_stock", *flags, "--meet-at", f"{folder}/store"),
            *("--num-workers", "0", "--log-interval", "1", "--eval-iters", "0", "--eval-interval", "1000"),
        ]
        processes = []
        try:
            for rank, log in enumerate(logs):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                env = {**environment, **place, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
                with log.open("w") as output:
                    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
                processes.append(process)
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
        written = [log.read_text() for log in logs]
    assert codes == [0] * ranks, "\n".join(text[-5000:] for text in written)
    losses = {int(step): float(loss) for step, loss in LOGGED_LOSS.findall(written[-1])}
    first, second, *_ = losses  # what is logged at the second step is the mean of both
    losses[second] = 2 * losses[second] - losses[first]
    return losses


def stock_model(model: FANformerConfig, parallel: ParallelConfig, spec: list[str], *, has_engine: bool = False) -> Any:
    """Stock Megatron-LM's GPTModel, or of a stack HybridModel, in the present process groups, with its own weights."""
    if not HAS_TRAINING:
        return _model_by_hand(model, parallel, spec)
    from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder
    from megatron.training.models.hybrid import HybridModelBuilder

    flags = command_line(model, parallel, spec, has_engine=has_engine)
    args = parsed_arguments(flags, torch.distributed.get_world_size())
    with contextlib.redirect_stdout(io.StringIO()):  # it tells how it pads the vocabulary
        groups = ProcessGroupCollection.use_mpu_process_groups()
        if args.hybrid_layer_pattern:
            return HybridModelBuilder(hybrid_config_from_args(args)).build_model(groups)
        return GPTModelBuilder(gpt_config_from_args(args)).build_model(groups)


def own_name(name: str) -> str:
    """Our name of a hybrid stack's weight, whose `*` and `-` are layers of their own."""
    name = re.sub(r"(?<=layers\.)\d+", lambda number: str(int(number[0]) // 2), name)
    return name.replace("final_norm", "final_layernorm")


def configuration_by_hand(model: FANformerConfig, parallel: ParallelConfig) -> dict[str, Any]:
    """The fields of TransformerConfig that Megatron-LM fills in from these flags, or from their defaults."""
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "kv_channels": model.kv_channels,
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "sequence_parallel": parallel.sequence_parallel,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "layernorm_zero_centered_gamma": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "bias_activation_fusion": True,
        "add_bias_linear": False,
        "qk_layernorm": model.qk_layernorm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "rotary_interleaved": False,
        "init_method_std": 0.02,
        "transformer_impl": "local",
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": True,
        "bias_dropout_fusion": True,
        "batch_p2p_comm": True,
        "deallocate_pipeline_outputs": True,
    }


def arguments_by_hand(model: FANformerConfig, parallel: ParallelConfig, spec: list[str]) -> argparse.Namespace:
    """What Megatron-LM's parser makes of these flags and of their defaults, as far as it is about the model.

    The names are those of megatron-core 0.16's Megatron-LM.
    """
    fields = configuration_by_hand(model, parallel)
    same = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "normalization")
    return argparse.Namespace(
        **{name: fields[name] for name in same},
        group_query_attention=model.num_query_groups is not None,
        num_query_groups=model.num_query_groups or 1,
        swiglu=True,
        norm_epsilon=fields["layernorm_epsilon"],
        apply_layernorm_1p=False,
        apply_residual_connection_post_layernorm=False,
        add_bias_linear=False,
        add_qkv_bias=False,
        qk_layernorm=model.qk_layernorm,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        rotary_percent=1.0,
        rotary_interleaved=False,
        rotary_seq_len_interpolation_factor=None,
        use_rope_scaling=False,
        softmax_type="vanilla",
        window_size=None,
        mtp_num_layers=None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        seq_length=model.seq_length,
        max_position_embeddings=model.seq_length,
        vocab_size=model.vocab_size,
        make_vocab_size_divisible_by=128,
        untie_embeddings_and_output_weights=model.untie_embeddings_and_output_weights,
        params_dtype=torch.float32,
        spec=spec,
    )


def saved_arguments(model: FANformerConfig, parallel: ParallelConfig, spec: list[str]) -> argparse.Namespace:
    """What Megatron-LM saves of its arguments after some steps."""
    if HAS_TRAINING:
        args = parsed_arguments(command_line(model, parallel, spec), torch.distributed.get_world_size())
    else:
        args = arguments_by_hand(model, parallel, spec)
    args.model_type = ModelType.encoder_or_decoder  # an object of its own, as there are several
    args.consumed_train_samples = 3
    return args


def _model_by_hand(model: FANformerConfig, parallel: ParallelConfig, spec: list[str]) -> GPTModel:
    return GPTModel(
        config=TransformerConfig(**configuration_by_hand(model, parallel)),
        transformer_layer_spec=import_module(spec),
        vocab_size=model.padded_vocab_size,
        max_sequence_length=model.seq_length,
        pre_process=True,
        post_process=True,
        fp16_lm_cross_entropy=False,
        parallel_output=True,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_percent=1.0,
        rotary_base=model.rotary_base,
        rope_scaling=False,
        mtp_block_spec=None,
        vp_stage=None,
        pg_collection=None,
    )
