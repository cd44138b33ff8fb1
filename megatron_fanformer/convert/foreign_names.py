"""Settings of other trainers: their names here, or why they have none; one table.

It answers an unknown key of a configuration (`train/config.py`), turns Megatron-LM's arguments, from a checkpoint
(`megatron_lm.py`) or a command line (`train/megatron_arguments.py`), into a model or into reasons to refuse it, and is
the page docs/from-megatron-lm.md. Names are those of Megatron-LM's `pretrain_gpt.py` (megatron-core 0.19), of
transformers' `TrainingArguments` and model configurations, and of the configurations of OLMo and OLMo-core.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_fanformer.model.config import FANformerConfig


class ForeignName(NamedTuple):
    """Settings of another trainer that have one answer here."""

    names: str
    """The names there, separated by spaces."""
    field: str | None
    """The dotted name of our field; None: there is no such setting."""
    note: str = ""
    """How the field differs, or how to set it; without a field, the reason: a clause that follows "because"."""

    @property
    def answer(self) -> str:
        """Return the advice for one of the names, as a clause."""
        if self.field is None:
            return f"not there, because {self.note}; leave it out"
        return f"did you mean {self.field}{f' ({self.note})' if self.note else ''}?"


def _table(text: str) -> tuple[ForeignName, ...]:
    """Return rows `NAMES = FIELD: NOTE`, or `NAMES: REASON` where there is no such setting; indented lines go on."""
    rows = []
    for line in text.strip().replace("\n    ", " ").splitlines():
        left, _, note = line.partition(": ")
        names, _, field = left.partition(" = ")
        rows.append(ForeignName(names, field or None, note))
    return tuple(rows)


_WEIGHTS_ALONE = "weights alone; a run resumes from its run_dir by itself"

_MEGATRON_LM = {
    "Model": """
--num-layers = model.num_layers
--hybrid-layer-pattern --hybrid-override-pattern = model.num_layers:
    half of `*-` repeated; where stages end is for parallel to state
--hidden-size = model.hidden_size
--ffn-hidden-size = model.ffn_hidden_size: has no default
--num-attention-heads = model.num_attention_heads
--kv-channels: the head size is hidden_size / num_attention_heads
--group-query-attention --num-query-groups = model.num_query_groups: a number turns it on
--seq-length = model.seq_length
--max-position-embeddings = model.seq_length: rotary positions have no table
--position-embedding-type --use-rotary-position-embeddings --no-rope-freq: positions are always rotary
--rotary-base = model.rotary_base
--rotary-percent --rotary-interleaved: the halves of whole heads are rotated
--rotary-seq-len-interpolation-factor = model.rope_scaling.factor: with rope_type linear
--use-rope-scaling: of scaled positions there are transformers' linear and yarn (model.rope_scaling), not Llama 3's
--normalization: every norm is an RMSNorm
--norm-epsilon = model.layernorm_epsilon: 1e-6 by default, not 1e-5
--apply-layernorm-1p: norms store their weights as they are
--apply-residual-connection-post-layernorm: norms stay out of the residual stream
--qk-layernorm = model.qk_layernorm: also by the spec, `layer_spec(..., qk_layernorm=True)`
--qk-l2-norm: norms of queries and keys have weights (model.qk_layernorm)
--softmax-type: the softmax has no further term
--swiglu --squared-relu --openai-gelu --quick-geglu --glu-linear-offset --activation-func-clamp-value:
    every MLP is a SwiGLU
--disable-bias-linear --add-qkv-bias = model.fan.bias: FAN's bias is the only one
--untie-embeddings-and-output-weights = model.untie_embeddings_and_output_weights
--make-vocab-size-divisible-by = model.make_vocab_size_divisible_by: times the tensor parallel size
--vocab-size = model.vocab_size
--padded-vocab-size = model.make_vocab_size_divisible_by: the padded size follows from it
--hidden-dropout --attention-dropout: there is no dropout
--init-method-std --init-method-xavier-uniform: weights are drawn by the authors' scheme
--use-mup: nothing is scaled by the model's width
--spec = model.fan.placement: none is a Transformer
--use-mcore-models: the model is always megatron-core's
--num-experts --moe-grouped-gemm --expert-model-parallel-size: layers are dense
--multi-latent-attention: attention is multi-head or grouped-query
--window-size: attention is over the whole sequence
--mtp-num-layers: a model predicts one token at a time
""",
    "Kernels": """
--transformer-impl = kernels.transformer_impl: auto by default
--attention-backend = kernels.attention_backend: auto, fused, flash or unfused
--use-flash-attn = kernels.attention_backend: flash
--no-gradient-accumulation-fusion = kernels.gradient_accumulation_fusion: false
--cross-entropy-loss-fusion = kernels.chunked_loss_head: never holds all logits
--cuda-graph-impl = kernels.cuda_graph_impl: none or local
--enable-cuda-graph = kernels.cuda_graph_impl: local
--deterministic-mode = runtime.deterministic_mode
""",
    "Layout": """
--tensor-model-parallel-size = parallel.tensor_model_parallel_size
--pipeline-model-parallel-size = parallel.pipeline_model_parallel_size
--num-layers-per-virtual-pipeline-stage = parallel.virtual_pipeline_model_parallel_size:
    chunks per stage, not layers per chunk
--num-virtual-stages-per-pipeline-rank = parallel.virtual_pipeline_model_parallel_size
--decoder-first-pipeline-num-layers = parallel.num_layers_in_first_pipeline_stage
--decoder-last-pipeline-num-layers = parallel.num_layers_in_last_pipeline_stage
--account-for-embedding-in-pipeline-split = parallel.num_layers_in_first_pipeline_stage: as a number of layers
--account-for-loss-in-pipeline-split = parallel.num_layers_in_last_pipeline_stage: as a number of layers
--pipeline-model-parallel-layout = parallel.pipeline_model_parallel_layout: of E, t and L
--no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush:
    the interleaved schedule always overlaps, 1F1B never
--context-parallel-size = parallel.context_parallel_size
--cp-comm-type = parallel.cp_comm_type: one for all layers
--sequence-parallel = parallel.sequence_parallel
--use-distributed-optimizer = parallel.use_distributed_optimizer: true by default
--overlap-grad-reduce = parallel.overlap_grad_reduce: on by itself on GPUs
--overlap-param-gather = parallel.overlap_param_gather: on by itself on GPUs
--ddp-bucket-size = parallel.ddp_bucket_size
--ddp-num-buckets = parallel.ddp_bucket_size: parameters per bucket, not their number
--accumulate-allreduce-grads-in-fp32 = precision.grad_reduce_in_fp32
--grad-reduce-in-bf16 = precision.grad_reduce_in_fp32: false, where that is given
--calculate-per-token-loss --ddp-average-in-collective: gradients are divided once, by the global batch's tokens
--use-megatron-fsdp --use-torch-fsdp2 --data-parallel-sharding-strategy:
    replicas share the optimizer's state, not weights
--num-distributed-optimizer-instances = parallel.num_distributed_optimizer_instances
--tp-comm-overlap: the Engine's buffers for it do not know the FAN map
--recompute-granularity = parallel.recompute_granularity
--recompute-activations = parallel.recompute_granularity: selective
--recompute-method = parallel.recompute_method
--recompute-num-layers = parallel.recompute_num_layers
--recompute-modules = parallel.recompute_modules: core_attn, layernorm, mlp, and fan
--distribute-saved-activations = parallel.sequence_parallel: shards them too
--cpu-offloading-num-layers --optimizer-cpu-offload: everything stays on its device
--distributed-backend = runtime.distributed_backend
--distributed-timeout-minutes = runtime.distributed_timeout_minutes
""",
    "Number formats": """
--bf16 = precision.dtype: bf16
--fp16 --loss-scale --initial-loss-scale --min-loss-scale --hysteresis:
    16-bit numbers are bf16, which needs no loss scale
--fp8-format = precision.fp8: e4m3 or hybrid
--fp8-recipe = precision.fp8_recipe: tensorwise by default
--fp8-amax-history-len = precision.fp8_amax_history_len
--fp8-amax-compute-algo = precision.fp8_amax_compute_algo
--first-last-layers-bf16 = precision.first_last_layers_bf16
--num-layers-at-start-in-bf16 = precision.num_layers_at_start_in_bf16
--num-layers-at-end-in-bf16 = precision.num_layers_at_end_in_bf16
--fp4-format: FP8 (precision.fp8) is the narrowest format
--exp-avg-dtype = optimizer.exp_avg_dtype: fp32 or bf16
--exp-avg-sq-dtype = optimizer.exp_avg_sq_dtype: fp32 or bf16
--use-precision-aware-optimizer = optimizer.exp_avg_dtype: bf16, and exp_avg_sq_dtype likewise
--main-grads-dtype = precision.grad_reduce_in_fp32: false, for those of bf16
""",
    "Batches and length": """
--micro-batch-size = training.micro_batch_size
--global-batch-size = training.global_batch_size: has no default
--rampup-batch-size --step-batch-size-schedule: the global batch has one size
--train-iters = training.train_iters
--train-samples = training.train_iters: in steps
--seed = training.seed
--exit-interval = training.exit_interval
--exit-duration-in-mins = training.exit_duration_in_mins
--exit-signal-handler: signals always save and end a run
--eval-interval = training.eval_interval
--eval-iters = training.eval_iters
--rerun-mode = recovery.compute_again: true or false
--no-check-for-nan-in-loss-and-grad = recovery.check_for_nan_in_loss_and_grad: false
--check-for-spiky-loss --check-for-large-grads = recovery.check_for_spiky_loss
--iterations-to-skip = recovery.iterations_to_skip
""",
    "Optimizer": """
--optimizer = optimizer.name: adamw, which is Megatron's adam, or muon
--sgd-momentum: there is no SGD
--muon-momentum = optimizer.muon_momentum
--muon-extra-scale-factor = optimizer.muon_extra_scale_factor: 0.2 by default, not 1; the scale is always spectral
--muon-nesterov --muon-use-nesterov: momentum is always Nesterov's
--muon-tp-mode: matrices are orthogonalized whole, at any tensor parallel size
--lr = optimizer.lr
--weight-decay = optimizer.weight_decay: 0.1 by default; of linear weights only
--adam-beta1 = optimizer.adam_beta1
--adam-beta2 = optimizer.adam_beta2: 0.95 by default, not 0.999
--adam-eps = optimizer.adam_eps: 1e-5 by default, not 1e-8
--clip-grad = optimizer.clip_grad
--decoupled-lr --decoupled-min-lr: all weights have one learning rate
""",
    "Schedule": """
--lr-decay-style = schedule.lr_decay_style: cosine by default
--lr-decay-iters = schedule.lr_decay_iters
--lr-decay-samples = schedule.lr_decay_iters: in steps
--lr-warmup-iters = schedule.lr_warmup_iters
--lr-warmup-samples = schedule.lr_warmup_iters: in steps
--lr-warmup-fraction = schedule.lr_warmup_fraction
--min-lr = schedule.min_lr: a tenth of the peak by default, not 0
--lr-wsd-decay-iters = schedule.lr_wsd_decay_iters
--lr-wsd-decay-samples = schedule.lr_wsd_decay_iters: in steps
--lr-wsd-decay-style = schedule.lr_wsd_decay_style: minus_sqrt by default
""",
    "Data": """
--data-path --train-data-path = data.train_data: the same blend form, as a list
--data-args-path --per-split-data-args-path = data.train_data: @FILE as an item
--valid-data-path --multiple-validation-sets = data.valid_data: each set by its name
--test-data-path = data.valid_data: one more set
--split = data.split
--data-cache-path = data.cache_path
--sft = data.format: sft, on what prepare --chat has written
--num-workers = data.num_workers: on a CPU 0 by default, not 2
--reset-attention-mask --dataloader-inter-document-masking = data.reset_attention_mask: by the end-of-text id
--reset-position-ids: rotary positions are relative
--eod-mask-loss = data.eod_mask_loss
--tokenizer-type: its file (data.tokenizer) shows it
--tokenizer-model = data.tokenizer
--vocab-file --merge-file = data.tokenizer: a tokenizer.json holds both
""",
    "Checkpoints": f"""
--save = training.run_dir: for metrics too
--save-interval = checkpoint.save_interval
--save-retain-interval = checkpoint.keep: how many of the newest
--load --finetune --pretrained-checkpoint = checkpoint.load: {_WEIGHTS_ALONE}
--no-load-optim --no-load-rng = checkpoint.load: weights alone
--ckpt-step = checkpoint.load: the step's own folder; or its name in checkpoints/latest
--no-save-optim --no-save-rng: every checkpoint can be resumed from
--ckpt-format --auto-detect-ckpt-format: checkpoints are megatron-core's torch_dist
--async-save = checkpoint.async_save
--ckpt-fully-parallel-save --no-ckpt-fully-parallel-save --ckpt-fully-parallel-load = checkpoint.fully_parallel_save:
    for reading too
""",
    "Logging": """
--log-interval = logging.log_interval: of printed lines alone
--tensorboard-dir = logging.tensorboard: in the run's folder
--wandb-project = logging.wandb_project
--wandb-exp-name = logging.wandb_exp_name
--wandb-entity = logging.wandb_entity
--log-params-norm = logging.norm_interval: in steps
--log-timers-to-tensorboard --timing-log-level = logging.profile_steps: its table has a step's operations
--logging-level = logging.folder: a log file of each rank, at level DEBUG
--log-straggler = logging.straggler_interval: on by default
--profile --use-pytorch-profiler = logging.profile_steps: torch's profiler, for the steps that it names
--profile-step-start --profile-step-end = logging.profile_steps: [FIRST, LAST], and the last is profiled, too
--profile-ranks = logging.profile_ranks
--record-memory-history: torch.cuda.memory has a snapshot of its own
""",
}
MEGATRON_LM = {section: _table(text) for section, text in _MEGATRON_LM.items()}
"""Megatron-LM's names, by the sections of the page."""

HUGGING_FACE = _table(
    """
learning_rate = optimizer.lr
adam_epsilon = optimizer.adam_eps
max_grad_norm = optimizer.clip_grad
lr_scheduler_type = schedule.lr_decay_style
warmup_steps = schedule.lr_warmup_iters
warmup_ratio = schedule.lr_warmup_fraction
max_steps = training.train_iters
num_train_epochs num_epochs = training.epochs: with data.format sft, else train_iters
per_device_train_batch_size per_device_eval_batch_size = training.micro_batch_size
train_batch_size batch_size = training.global_batch_size: over all replicas
gradient_accumulation_steps = training.global_batch_size:
    a replica accumulates global_batch_size / (micro_batch_size x replicas) micro batches
eval_steps eval_strategy evaluation_strategy = training.eval_interval: in steps
output_dir run_name = training.run_dir
data_seed = training.seed
logging_steps = logging.log_interval
report_to = logging.tensorboard: or logging.wandb_project; metrics.jsonl is always written
save_steps save_strategy = checkpoint.save_interval: in steps
save_total_limit = checkpoint.keep
resume_from_checkpoint = training.run_dir: the same command resumes from its newest checkpoint
dataloader_num_workers = data.num_workers
gradient_checkpointing activation_checkpointing = parallel.recompute_granularity
ddp_timeout = runtime.distributed_timeout_minutes: in minutes
use_cpu no_cuda = runtime.device: cpu
torch_dtype = precision.dtype: fp32 or bf16
attn_implementation = kernels.attention_backend
torch_compile compile: layers have fused kernels of their own
deepspeed fsdp fsdp_config: the section parallel spreads a model, by megatron-core
num_hidden_layers n_layer = model.num_layers
n_embd = model.hidden_size
n_head = model.num_attention_heads
intermediate_size n_inner = model.ffn_hidden_size
num_key_value_heads = model.num_query_groups
max_seq_length max_length block_size n_positions n_ctx = model.seq_length
rms_norm_eps = model.layernorm_epsilon
rope_theta = model.rotary_base
rope_parameters = model.rope_scaling.rope_type: and the other keys of model.rope_scaling; rope_theta is rotary_base
use_qk_norm = model.qk_layernorm
tie_word_embeddings = model.untie_embeddings_and_output_weights: the opposite
head_dim: the head size is hidden_size / num_attention_heads
hidden_act activation_type: every MLP is a SwiGLU
attention_bias mlp_bias include_bias = model.fan.bias: FAN's bias is the only one
initializer_range init_fn init_std: weights are drawn by the authors' scheme
"""
)
"""transformers' names, including those that it shares with OLMo."""

OLMO = _table(
    f"""
d_model = model.hidden_size
n_layers = model.num_layers
n_heads = model.num_attention_heads
n_kv_heads = model.num_query_groups
mlp_hidden_size = model.ffn_hidden_size: half of it: SwiGLU's two halves are counted once
mlp_ratio = model.ffn_hidden_size: in units: mlp_ratio × d_model / 2, for SwiGLU's two halves are counted in it
max_sequence_length sequence_length = model.seq_length
weight_tying = model.untie_embeddings_and_output_weights: the opposite
embedding_size = model.make_vocab_size_divisible_by: the padded size follows from it
layer_norm_eps = model.layernorm_epsilon
layer_norm_type: every norm is an RMSNorm
rope alibi: positions are always rotary
attention_layer_norm qk_norm = model.qk_layernorm: a norm of each head, not of all together
residual_dropout embedding_dropout: there is no dropout
softmax_auxiliary_loss = training.z_loss_coefficient: a number turns it on
auxiliary_loss_multiplier z_loss_multiplier = training.z_loss_coefficient
device_train_microbatch_size = training.micro_batch_size
rank_microbatch_size = training.micro_batch_size: in samples, not in tokens
global_train_batch_size = training.global_batch_size
max_duration = training.train_iters: in steps
betas = optimizer.adam_beta1: and optimizer.adam_beta2
eps = optimizer.adam_eps
t_warmup warmup = schedule.lr_warmup_iters: in steps
t_max = schedule.lr_decay_iters: in steps
alpha_f = schedule.min_lr: a rate, not a share of the peak
save_folder = training.run_dir
save_num_checkpoints_to_keep = checkpoint.keep
load_path = checkpoint.load: {_WEIGHTS_ALONE}
remote_save_folder = checkpoint.mirror
save_overwrite: a run never replaces another's folder: name another training.run_dir
console_log_interval = logging.log_interval
wandb = logging.wandb_project
evaluators = evaluation.tasks: and data.valid_data, evaluation.perplexity
paths = data.train_data
"""
)
"""The names of OLMo and OLMo-core that Hugging Face does not have."""

EARLIER = _table(
    "batches = evaluation.perplexity.limit_tokens: in tokens, so that it does not depend on the micro batch"
)
"""Names of fields in earlier versions whose values meant something else."""


def answer(plain_name: str) -> str | None:
    """Return the advice for a setting of another trainer, as a clause; None if the name is unknown."""
    row = row_of(plain_name)
    return None if row is None else row.answer


def row_of(plain_name: str) -> ForeignName | None:
    """Return the row of another trainer's setting; None if the name is unknown."""
    return _by_plain_name().get(plain_name)


def answers(arguments: Sequence[str]) -> list[str]:
    """Return a line for each argument that is another trainer's: its field here, or the reason to have none."""
    by_flag = {}
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag.startswith("--") and "." not in flag and (row := row_of(plain(flag))) is not None:
            by_flag[flag] = f"is {row.field}{f' ({row.note})' if row.note else ''}" if row.field else f"is {row.answer}"
    return [f"{flag} {answer}" for flag, answer in by_flag.items()]


def plain(name: str) -> str:
    """Return a key (dotted or not) or a flag as an identifier: num_layers for `--num-layers`."""
    return name.rpartition(".")[2].lstrip("-").replace("-", "_")


@functools.cache
def _by_plain_name() -> dict[str, ForeignName]:
    tables = (*MEGATRON_LM.values(), HUGGING_FACE, OLMO, EARLIER)
    return {plain(name): row for table in tables for row in table for name in row.names.split()}


# -- the model that Megatron-LM's arguments describe

MOST_SHOWN = 80  # characters of a wrong value
SECTIONS = ("fan", "rope_scaling")
FIELDS = tuple(field.name for field in dataclasses.fields(FANformerConfig) if field.name not in SECTIONS)
Arguments = Mapping[str, Any]
SPECS = (
    ["megatron_fanformer.model.layer_spec", "fanformer_layer_spec"],
    ["megatron_fanformer.model.hybrid_spec", "fanformer_stack_spec"],
)
"""Our layer specs, as `--spec` names them."""

RULES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "swiglu": ("--swiglu", (True,)),
    "glu_linear_offset": ("--glu-linear-offset", (0.0, None)),
    "activation_func_clamp_value": ("--activation-func-clamp-value", (None,)),
    "normalization": ("--normalization", ("RMSNorm",)),
    "apply_layernorm_1p": ("--apply-layernorm-1p", (False,)),
    "layernorm_zero_centered_gamma": ("--apply-layernorm-1p", (False,)),
    "apply_residual_connection_post_layernorm": ("--apply-residual-connection-post-layernorm", (False,)),
    "position_embedding_type": ("--position-embedding-type", ("rope",)),
    "no_rope_freq": ("--no-rope-freq", (None,)),
    "rotary_percent": ("--rotary-percent", (1.0,)),
    "rotary_interleaved": ("--rotary-interleaved", (False,)),
    "use_rope_scaling": ("--use-rope-scaling", (False,)),
    "softmax_type": ("--softmax-type", ("vanilla",)),
    "window_size": ("--window-size", (None,)),
    "add_bias_linear": ("--disable-bias-linear", (False,)),
    "add_qkv_bias": ("--add-qkv-bias", (False,)),
    "mtp_num_layers": ("--mtp-num-layers", (None, 0)),
    "use_mup": ("--use-mup", (False,)),
    "qk_l2_norm": ("--qk-l2-norm", (False,)),
    "num_experts": ("--num-experts", (None, 0)),
    "multi_latent_attention": ("--multi-latent-attention", (False,)),
}
"""By argument: its flag, whose row above has the reason, and the allowed values; the first is Megatron-LM's default
where a version has no such argument. But for `LAYERS`, tensors do not show them."""
LAYERS = ("num_experts", "multi_latent_attention")  # which a --spec states in their place; ours has neither
DROPOUT = ("hidden_dropout", "attention_dropout")  # leaves no trace in a model that does not train


def model_problems(arguments: Arguments) -> list[str]:
    """Return a clause for each argument that makes a model which cannot be built here."""
    reasons = [
        _problem(name, arguments[name], flag)
        for name, (flag, required) in RULES.items()
        if arguments.get(name, required[0]) not in required and not (name in LAYERS and arguments.get("spec"))
    ]
    width, heads, size = (arguments.get(name) for name in ("hidden_size", "num_attention_heads", "kv_channels"))
    if type(width) is type(heads) is type(size) is int and width != heads * size:
        reasons.append(_problem("kv_channels", size, "--kv-channels"))
    return reasons


def _problem(name: str, value: Any, flag: str) -> str:
    row = row_of(plain(flag))
    assert row is not None, flag
    return f"{name} ({flag}) is {value!r:.{MOST_SHOWN}}, but {row.note}"


def model_fields(arguments: Arguments) -> dict[str, Any]:
    """Return the model's fields, but for `fan`, under our names."""
    rows = [row for row in MEGATRON_LM["Model"] if row.field]
    others = {row.field: plain(row.names.split()[-1]) for row in reversed(rows)}
    values = {name: arguments.get(name, arguments.get(others[f"model.{name}"])) for name in FIELDS}
    if not arguments.get("group_query_attention"):
        values["num_query_groups"] = None  # Megatron-LM's own default of 1 has no effect then
    if (factor := arguments.get("rotary_seq_len_interpolation_factor")) not in (None, 1):
        values["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return {name: value for name, value in values.items() if value is not None}
