"""Megatron-LM's arguments: a table of those that have another name here, and rules for the model that they describe.

Most arguments of `pretrain_gpt.py` (megatron-core 0.19) have a field of the same name; the table has those whose field
has another name. It serves hints about unknown keys of a configuration (`train/config.py`), the conversion of a command
line (`train/megatron_arguments.py`), and docs/from-megatron-lm.md. The rules for the model apply to a command line and
to the arguments in a checkpoint (`megatron_lm.py`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_fanformer.model.config import FANformerConfig


class Counterpart(NamedTuple):
    """The field that corresponds to an argument of another name."""

    field: str
    note: str  # how the field's value differs from the argument's; empty if it does not

    def __str__(self) -> str:
        return f"{self.field} ({self.note})" if self.note else self.field


def _table(text: str) -> dict[str, Counterpart]:
    """Return the fields by their arguments' names, from lines `NAMES = FIELD: NOTE`."""
    rows = {}
    for line in text.strip().splitlines():
        names, _, right = line.partition(" = ")
        field, _, note = right.partition(": ")
        rows.update(dict.fromkeys(names.split(), Counterpart(field, note)))
    return rows


CONVERTED = _table("""
norm_epsilon = model.layernorm_epsilon
rotary_seq_len_interpolation_factor = model.rope_scaling.factor: with rope_type linear
spec = model.fan.placement: none is a Transformer
use_flash_attn = kernels.attention_backend: flash
no_gradient_accumulation_fusion = kernels.gradient_accumulation_fusion: false
cross_entropy_loss_fusion = kernels.chunked_loss_head: never holds all logits
enable_cuda_graph = kernels.cuda_graph_impl: local
num_virtual_stages_per_pipeline_rank = parallel.virtual_pipeline_model_parallel_size
decoder_first_pipeline_num_layers = parallel.num_layers_in_first_pipeline_stage
decoder_last_pipeline_num_layers = parallel.num_layers_in_last_pipeline_stage
recompute_activations = parallel.recompute_granularity: selective
accumulate_allreduce_grads_in_fp32 = precision.grad_reduce_in_fp32
grad_reduce_in_bf16 main_grads_dtype = precision.grad_reduce_in_fp32: false, for bf16
bf16 = precision.dtype: bf16
fp8_format = precision.fp8: e4m3 or hybrid
train_samples = training.train_iters: in steps
rerun_mode = recovery.compute_again: true or false
no_check_for_nan_in_loss_and_grad = recovery.check_for_nan_in_loss_and_grad: false
check_for_large_grads = recovery.check_for_spiky_loss: true
optimizer = optimizer.name: adamw, which is Megatron's adam, or muon
lr_decay_samples = schedule.lr_decay_iters: in steps
lr_warmup_samples = schedule.lr_warmup_iters: in steps
lr_wsd_decay_samples = schedule.lr_wsd_decay_iters: in steps
data_path train_data_path = data.train_data: the same blend form, as a list
data_args_path = data.train_data: @FILE as an item
valid_data_path test_data_path = data.valid_data: each set by its name
data_cache_path = data.cache_path
sft = data.format: sft, on what prepare --chat has written
dataloader_inter_document_masking = data.reset_attention_mask: by the end-of-text id
tokenizer_model = data.tokenizer
save = training.run_dir: for metrics too
tensorboard_dir = logging.tensorboard: true; in the run's folder
""")
"""Arguments whose values `config --from-megatron` converts to values of the fields."""

BY_HAND = _table("""
hybrid_layer_pattern hybrid_override_pattern = model.num_layers: half of `*-` repeated
padded_vocab_size = model.make_vocab_size_divisible_by: the padded size follows from it
num_layers_per_virtual_pipeline_stage = parallel.virtual_pipeline_model_parallel_size: chunks, not layers per chunk
account_for_embedding_in_pipeline_split = parallel.num_layers_in_first_pipeline_stage: as a number of layers
account_for_loss_in_pipeline_split = parallel.num_layers_in_last_pipeline_stage: as a number of layers
ddp_num_buckets = parallel.ddp_bucket_size: parameters per bucket, not their number
fp16 = precision.dtype: bf16, which needs no loss scale
vocab_file merge_file = data.tokenizer: a tokenizer.json holds both
per_split_data_args_path = data.train_data: @FILE as an item
load finetune pretrained_checkpoint = checkpoint.load: after `convert`; weights alone, for a run resumes by itself
save_retain_interval = checkpoint.keep: how many of the newest
log_params_norm = logging.norm_interval: in steps
profile profile_step_start profile_step_end = logging.profile_steps: [FIRST, LAST], both profiled
""")
"""Arguments whose values do not determine the fields' values, so that the user must set the fields."""

COUNTERPARTS = {**CONVERTED, **BY_HAND}


def plain(name: str) -> str:
    """Return a key (dotted or not) or a flag as an identifier: num_layers for `--num-layers`."""
    return name.rpartition(".")[2].lstrip("-").replace("-", "_")


# -- the model

MOST_SHOWN = 80  # characters of a wrong value
FIELDS = tuple(field.name for field in dataclasses.fields(FANformerConfig) if field.name not in ("fan", "rope_scaling"))
Arguments = Mapping[str, Any]
SPECS = (
    ["megatron_fanformer.model.layer_spec", "fanformer_layer_spec"],
    ["megatron_fanformer.model.hybrid_spec", "fanformer_stack_spec"],
)
"""Our layer specs, as `--spec` names them."""

RULES: dict[str, tuple[tuple[Any, ...], str]] = {
    "swiglu": ((True,), "every MLP is a SwiGLU"),
    "glu_linear_offset": ((0.0, None), "every MLP is a SwiGLU"),
    "activation_func_clamp_value": ((None,), "every MLP is a SwiGLU"),
    "normalization": (("RMSNorm",), "every norm is an RMSNorm"),
    "apply_layernorm_1p": ((False,), "norms store their weights as they are"),
    "layernorm_zero_centered_gamma": ((False,), "norms store their weights as they are"),
    "apply_residual_connection_post_layernorm": ((False,), "norms stay out of the residual stream"),
    "position_embedding_type": (("rope",), "positions are always rotary"),
    "no_rope_freq": ((None,), "positions are always rotary"),
    "rotary_percent": ((1.0,), "the halves of whole heads are rotated"),
    "rotary_interleaved": ((False,), "the halves of whole heads are rotated"),
    "use_rope_scaling": ((False,), "of scaled positions there are linear and yarn (model.rope_scaling), not Llama 3's"),
    "softmax_type": (("vanilla",), "the softmax has no further term"),
    "window_size": ((None,), "attention is over the whole sequence"),
    "add_bias_linear": ((False,), "FAN's bias is the only one"),
    "add_qkv_bias": ((False,), "FAN's bias is the only one"),
    "mtp_num_layers": ((None, 0), "a model predicts one token at a time"),
    "use_mup": ((False,), "nothing is scaled by the model's width"),
    "qk_l2_norm": ((False,), "norms of queries and keys have weights (model.qk_layernorm)"),
    "num_experts": ((None, 0), "layers are dense"),
    "multi_latent_attention": ((False,), "attention is multi-head or grouped-query"),
}
"""By argument: the allowed values and the reason. The first value is assumed where a version of Megatron-LM lacks the
argument. Of these arguments, only those in `LAYERS` show in a checkpoint's tensors."""
LAYERS = ("num_experts", "multi_latent_attention")  # Megatron-LM ignores them beside a --spec; our specs have neither
DROPOUT = ("hidden_dropout", "attention_dropout")  # they change training alone, not a model's weights


def model_problems(arguments: Arguments) -> list[str]:
    """Return a clause for each argument that states a property which no model here can have."""
    reasons: dict[str, str] = {}  # by argument
    for name, (allowed, reason) in RULES.items():
        is_ignored = name in LAYERS and arguments.get("spec")
        if not is_ignored and arguments.get(name, allowed[0]) not in allowed:  # [0]: assumed if missing
            reasons[name] = reason
    width, heads, size = (arguments.get(name) for name in ("hidden_size", "num_attention_heads", "kv_channels"))
    if type(width) is type(heads) is type(size) is int and width != heads * size:
        reasons["kv_channels"] = "the head size is hidden_size / num_attention_heads"
    return [f"{name} is {arguments[name]!r:.{MOST_SHOWN}}, but {reason}" for name, reason in reasons.items()]


def model_fields(arguments: Arguments) -> dict[str, Any]:
    """Return the model's fields that the arguments state, by our names, except the fields in `fan`."""
    values = {name: arguments.get(name) for name in FIELDS}
    values["layernorm_epsilon"] = arguments.get("layernorm_epsilon", arguments.get("norm_epsilon"))
    if not arguments.get("group_query_attention"):
        values["num_query_groups"] = None  # Megatron-LM's own default of 1 has no effect then
    factor = arguments.get("rotary_seq_len_interpolation_factor")
    if factor not in (None, 1):
        values["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return {name: value for name, value in values.items() if value is not None}
