"""What settings of other trainers are called here, or why they are not there: one table.

It answers an unknown key of a configuration (`training/config.py`), gives the reasons for which a checkpoint of
Megatron-LM is refused (`megatron_lm.py`), and is the page docs/from-megatron-lm.md. Names are those of Megatron-LM's
`pretrain_gpt.py` (megatron-core 0.19), of transformers' `TrainingArguments` and model configurations, and of the
configurations of OLMo and OLMo-core.
"""

import functools
from typing import NamedTuple


class ForeignName(NamedTuple):
    """Settings of another trainer that have one answer here."""

    names: str
    """As they are written there, separated by spaces."""
    field: str | None
    """Dotted; None: there is no such setting."""
    note: str = ""
    """How the field differs, or is to be set; without a field, the reason: a clause that follows "because"."""

    @property
    def answer(self) -> str:
        """Return the advice for somebody who gave one of the names, as a clause."""
        if self.field is None:
            return f"not there, because {self.note}; leave it out"
        return f"did you mean {self.field}{f' ({self.note})' if self.note else ''}?"


_NO_DROPOUT = "there is no dropout"
_PAPER = "the paper's model has none"
_DENSE = "layers are dense"
_FLOAT32_SUMS = "gradients are always summed in float32"
_IN_STEPS = "in steps"
_WEIGHTS_ALONE = "weights alone; a run resumes from its run_dir by itself"

MEGATRON_LM: dict[str, tuple[ForeignName, ...]] = {
    "Model": (
        ForeignName("--num-layers", "model.num_layers"),
        ForeignName("--hidden-size", "model.hidden_size"),
        ForeignName("--ffn-hidden-size", "model.ffn_hidden_size", "has no default"),
        ForeignName("--num-attention-heads", "model.num_attention_heads"),
        ForeignName("--kv-channels", None, "the head size is hidden_size / num_attention_heads"),
        ForeignName("--group-query-attention --num-query-groups", "model.num_query_groups", "a number turns it on"),
        ForeignName("--seq-length", "model.seq_length"),
        ForeignName("--max-position-embeddings", "model.seq_length", "rotary positions have no table"),
        ForeignName(
            "--position-embedding-type --use-rotary-position-embeddings --no-rope-freq",
            None,
            "positions are always rotary",
        ),
        ForeignName("--rotary-base", "model.rotary_base"),
        ForeignName("--rotary-percent --rotary-interleaved", None, "the halves of whole heads are rotated"),
        ForeignName(
            "--rotary-seq-len-interpolation-factor --use-rope-scaling",
            None,
            "a model is not extended beyond its length",
        ),
        ForeignName("--normalization", None, "every norm is an RMSNorm"),
        ForeignName("--norm-epsilon", "model.layernorm_epsilon", "1e-6 by default, not 1e-5"),
        ForeignName("--apply-layernorm-1p", None, "norms store their weights as they are"),
        ForeignName("--apply-residual-connection-post-layernorm", None, "norms stay out of the residual stream"),
        ForeignName("--qk-layernorm", None, _PAPER),
        ForeignName("--softmax-type", None, "the softmax has no further term"),
        ForeignName(
            "--swiglu --squared-relu --openai-gelu --quick-geglu --glu-linear-offset --activation-func-clamp-value",
            None,
            "every MLP is a SwiGLU",
        ),
        ForeignName("--disable-bias-linear --add-qkv-bias", "model.fan.bias", "FAN's bias is the only one"),
        ForeignName("--untie-embeddings-and-output-weights", "model.untie_embeddings_and_output_weights"),
        ForeignName(
            "--make-vocab-size-divisible-by",
            "model.make_vocab_size_divisible_by",
            "whatever the tensor parallel size",
        ),
        ForeignName("--vocab-size", "model.vocab_size"),
        ForeignName("--padded-vocab-size", "model.make_vocab_size_divisible_by", "the padded size follows from it"),
        ForeignName("--hidden-dropout --attention-dropout", None, _NO_DROPOUT),
        ForeignName(
            "--init-method-std --init-method-xavier-uniform",
            None,
            "weights are drawn by the authors' scheme",
        ),
        ForeignName("--use-mup", None, "nothing is scaled by the model's width"),
        ForeignName(
            "--use-cpu-initialization --data-parallel-random-init",
            None,
            "each weight is drawn whole, by its name",
        ),
        ForeignName("--spec", "model.fan.placement", "none is a Transformer"),
        ForeignName("--use-mcore-models", None, "the model is always megatron-core's"),
        ForeignName("--num-experts --moe-grouped-gemm --expert-model-parallel-size", None, _DENSE),
        ForeignName("--multi-latent-attention", None, "attention is multi-head or grouped-query"),
        ForeignName("--window-size", None, "attention is over the whole sequence"),
        ForeignName("--mtp-num-layers", None, "a model predicts one token at a time"),
    ),
    "Kernels": (
        ForeignName("--transformer-impl", "kernels.transformer_impl", "auto by default"),
        ForeignName("--attention-backend", "kernels.attention_backend", "auto, fused, flash or unfused"),
        ForeignName("--use-flash-attn", "kernels.attention_backend", "flash"),
        ForeignName(
            "--attention-softmax-in-fp32 --no-masked-softmax-fusion",
            None,
            "core attention does it",
        ),
        ForeignName("--no-rope-fusion", None, "it is fused with the Engine's layers on a GPU"),
        ForeignName("--no-bias-gelu-fusion --no-bias-swiglu-fusion", None, "SwiGLU is always fused"),
        ForeignName("--no-bias-dropout-fusion", None, "no layer ends with either"),
        ForeignName("--no-persist-layer-norm", None, "norms are torch's or the Engine's"),
        ForeignName("--no-gradient-accumulation-fusion", "kernels.gradient_accumulation_fusion", "false"),
        ForeignName(
            "--cross-entropy-loss-fusion",
            "kernels.chunked_loss_head",
            "never holds all logits",
        ),
        ForeignName("--fp16-lm-cross-entropy", None, "losses are computed in float32"),
        ForeignName("--cuda-graph-impl", "kernels.cuda_graph_impl", "none or local"),
        ForeignName("--enable-cuda-graph", "kernels.cuda_graph_impl", "local"),
        ForeignName("--deterministic-mode", "runtime.deterministic_mode"),
    ),
    "Layout": (
        ForeignName("--tensor-model-parallel-size", "parallel.tensor_model_parallel_size"),
        ForeignName("--pipeline-model-parallel-size", "parallel.pipeline_model_parallel_size"),
        ForeignName(
            "--num-layers-per-virtual-pipeline-stage",
            "parallel.virtual_pipeline_model_parallel_size",
            "chunks per stage, not layers per chunk",
        ),
        ForeignName("--num-virtual-stages-per-pipeline-rank", "parallel.virtual_pipeline_model_parallel_size"),
        ForeignName("--decoder-first-pipeline-num-layers", "parallel.num_layers_in_first_pipeline_stage"),
        ForeignName("--decoder-last-pipeline-num-layers", "parallel.num_layers_in_last_pipeline_stage"),
        ForeignName(
            "--account-for-embedding-in-pipeline-split",
            "parallel.num_layers_in_first_pipeline_stage",
            "as a number of layers",
        ),
        ForeignName(
            "--account-for-loss-in-pipeline-split",
            "parallel.num_layers_in_last_pipeline_stage",
            "as a number of layers",
        ),
        ForeignName("--pipeline-model-parallel-layout", None, "only the first and last stages can be unequal"),
        ForeignName(
            "--no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush",
            None,
            "the interleaved schedule always overlaps, 1F1B never",
        ),
        ForeignName("--microbatch-group-size-per-virtual-pipeline-stage", None, "megatron-core chooses it"),
        ForeignName("--context-parallel-size", "parallel.context_parallel_size"),
        ForeignName("--cp-comm-type", "parallel.cp_comm_type", "one for all layers"),
        ForeignName("--hierarchical-context-parallel-sizes", None, "keys and values are exchanged at one level"),
        ForeignName("--sequence-parallel", "parallel.sequence_parallel"),
        ForeignName("--use-distributed-optimizer", "parallel.use_distributed_optimizer", "true by default"),
        ForeignName("--overlap-grad-reduce", "parallel.overlap_grad_reduce", "on by itself on GPUs"),
        ForeignName("--overlap-param-gather", "parallel.overlap_param_gather", "on by itself on GPUs"),
        ForeignName("--ddp-bucket-size", "parallel.ddp_bucket_size"),
        ForeignName("--ddp-num-buckets", "parallel.ddp_bucket_size", "parameters per bucket, not their number"),
        ForeignName("--accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16", None, _FLOAT32_SUMS),
        ForeignName(
            "--calculate-per-token-loss --ddp-average-in-collective",
            None,
            "gradients are divided once, by the global batch's tokens",
        ),
        ForeignName(
            "--use-megatron-fsdp --use-torch-fsdp2 --data-parallel-sharding-strategy",
            None,
            "replicas share the optimizer's state, not weights",
        ),
        ForeignName("--num-distributed-optimizer-instances", None, "all replicas share one state"),
        ForeignName(
            "--tp-comm-overlap",
            None,
            "the Engine's buffers for it do not know the FAN map",
        ),
        ForeignName("--recompute-granularity", "parallel.recompute_granularity"),
        ForeignName("--recompute-activations", "parallel.recompute_granularity", "selective"),
        ForeignName("--recompute-method", "parallel.recompute_method"),
        ForeignName("--recompute-num-layers", "parallel.recompute_num_layers"),
        ForeignName("--recompute-modules", "parallel.recompute_modules", "core_attn, layernorm, mlp, and fan"),
        ForeignName("--distribute-saved-activations", "parallel.sequence_parallel", "shards them too"),
        ForeignName("--cpu-offloading-num-layers --optimizer-cpu-offload", None, "everything stays on its device"),
        ForeignName("--use-tp-pp-dp-mapping", None, "the order of ranks is fixed"),
        ForeignName("--distributed-backend", "runtime.distributed_backend"),
        ForeignName(
            "--distributed-timeout-minutes",
            "runtime.distributed_timeout_minutes",
            "follows the step time by default",
        ),
    ),
    "Number formats": (
        ForeignName("--bf16", "precision.dtype", "bf16"),
        ForeignName(
            "--fp16 --loss-scale --initial-loss-scale --min-loss-scale --hysteresis",
            None,
            "16-bit numbers are bf16, which needs no loss scale",
        ),
        ForeignName("--fp8-format", "precision.fp8", "e4m3 or hybrid"),
        ForeignName("--fp8-recipe", "precision.fp8_recipe", "tensorwise by default"),
        ForeignName("--fp8-amax-history-len", "precision.fp8_amax_history_len"),
        ForeignName("--fp8-amax-compute-algo", "precision.fp8_amax_compute_algo"),
        ForeignName("--first-last-layers-bf16", "precision.first_last_layers_bf16"),
        ForeignName("--num-layers-at-start-in-bf16", "precision.num_layers_at_start_in_bf16"),
        ForeignName("--num-layers-at-end-in-bf16", "precision.num_layers_at_end_in_bf16"),
        ForeignName(
            "--fp8-param-gather",
            None,
            "weights stored in FP8 would load in no other layers",
        ),
        ForeignName("--fp4-format", None, "FP8 (precision.fp8) is the narrowest format"),
        ForeignName("--fp32-residual-connection", None, "the residual stream has the type of the weights"),
        ForeignName(
            "--use-precision-aware-optimizer --main-grads-dtype --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype",
            None,
            "all of these are float32",
        ),
    ),
    "Batches and length": (
        ForeignName("--micro-batch-size", "training.micro_batch_size"),
        ForeignName("--global-batch-size", "training.global_batch_size", "has no default"),
        ForeignName("--rampup-batch-size --step-batch-size-schedule", None, "the global batch has one size"),
        ForeignName("--train-iters", "training.train_iters"),
        ForeignName("--train-samples", "training.train_iters", _IN_STEPS),
        ForeignName("--seed", "training.seed"),
        ForeignName("--exit-interval", "training.exit_interval"),
        ForeignName("--exit-duration-in-mins", "training.exit_duration_in_mins"),
        ForeignName("--exit-signal-handler", None, "signals always save and end a run"),
        ForeignName("--manual-gc --manual-gc-interval", None, "the loop always collects garbage itself"),
        ForeignName("--eval-interval", "training.eval_interval"),
        ForeignName("--eval-iters", "training.eval_iters"),
        ForeignName("--rerun-mode", "recovery.compute_again", "true or false"),
        ForeignName("--no-check-for-nan-in-loss-and-grad", "recovery.check_for_nan_in_loss_and_grad", "false"),
        ForeignName("--check-for-spiky-loss --check-for-large-grads", "recovery.check_for_spiky_loss"),
        ForeignName("--iterations-to-skip", "recovery.iterations_to_skip"),
    ),
    "Optimizer": (
        ForeignName("--optimizer", "optimizer.name", "adamw, which is Megatron's adam"),
        ForeignName("--sgd-momentum", None, "there is no SGD"),
        ForeignName("--lr", "optimizer.lr"),
        ForeignName("--weight-decay", "optimizer.weight_decay", "0.1 by default; of linear weights only"),
        ForeignName(
            "--start-weight-decay --end-weight-decay --weight-decay-incr-style", None, "weight decay is constant"
        ),
        ForeignName("--adam-beta1", "optimizer.adam_beta1"),
        ForeignName("--adam-beta2", "optimizer.adam_beta2", "0.95 by default, not 0.999"),
        ForeignName("--adam-eps", "optimizer.adam_eps", "1e-5 by default, not 1e-8"),
        ForeignName("--clip-grad", "optimizer.clip_grad"),
        ForeignName("--decoupled-lr --decoupled-min-lr", None, "all weights have one learning rate"),
    ),
    "Schedule": (
        ForeignName("--lr-decay-style", "schedule.lr_decay_style", "cosine by default"),
        ForeignName("--lr-decay-iters", "schedule.lr_decay_iters"),
        ForeignName("--lr-decay-samples", "schedule.lr_decay_iters", _IN_STEPS),
        ForeignName("--lr-warmup-iters", "schedule.lr_warmup_iters"),
        ForeignName("--lr-warmup-samples", "schedule.lr_warmup_iters", _IN_STEPS),
        ForeignName("--lr-warmup-fraction", "schedule.lr_warmup_fraction"),
        ForeignName("--lr-warmup-init", None, "a warm-up starts from 0"),
        ForeignName("--min-lr", "schedule.min_lr", "a tenth of the peak by default, not 0"),
        ForeignName("--lr-wsd-decay-iters", "schedule.lr_wsd_decay_iters"),
        ForeignName("--lr-wsd-decay-samples", "schedule.lr_wsd_decay_iters", _IN_STEPS),
        ForeignName("--lr-wsd-decay-style", "schedule.lr_wsd_decay_style", "minus_sqrt by default"),
        ForeignName(
            "--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler",
            None,
            "a resumed run always follows its configuration",
        ),
    ),
    "Data": (
        ForeignName("--data-path --train-data-path", "data.train_data", "the same blend form, as a list"),
        ForeignName("--data-args-path --per-split-data-args-path", "data.train_data", "@FILE as an item"),
        ForeignName("--valid-data-path --multiple-validation-sets", "data.valid_data", "each set by its name"),
        ForeignName("--test-data-path", "data.valid_data", "one more set"),
        ForeignName("--split", "data.split"),
        ForeignName("--data-cache-path", "data.cache_path"),
        ForeignName("--sft", "data.format", "sft, on what prepare --chat has written"),
        ForeignName("--num-workers", "data.num_workers", "0 by default, not 2"),
        ForeignName("--dataloader-type", None, "there is one order of samples"),
        ForeignName(
            "--reset-attention-mask --dataloader-inter-document-masking",
            "data.reset_attention_mask",
            "by the end-of-text id",
        ),
        ForeignName("--reset-position-ids", "data.reset_position_ids", "needs data.reset_attention_mask"),
        ForeignName("--eod-mask-loss", "data.eod_mask_loss"),
        ForeignName("--no-create-attention-mask-in-dataloader", None, "no mask is ever made"),
        ForeignName("--mock-data", None, "prepare makes token files of any text"),
        ForeignName("--tokenizer-type", None, "its file (data.tokenizer) shows it"),
        ForeignName("--tokenizer-model", "data.tokenizer"),
        ForeignName("--vocab-file --merge-file", "data.tokenizer", "a tokenizer.json holds both"),
    ),
    "Checkpoints": (
        ForeignName("--save", "training.run_dir", "for metrics too"),
        ForeignName("--save-interval", "checkpoint.save_interval"),
        ForeignName("--save-retain-interval", "checkpoint.keep", "how many of the newest"),
        ForeignName("--load --finetune --pretrained-checkpoint", "checkpoint.load", _WEIGHTS_ALONE),
        ForeignName("--no-load-optim --no-load-rng", "checkpoint.load", "weights alone"),
        ForeignName("--ckpt-step", "checkpoint.load", "the step's own folder; or its name in checkpoints/latest"),
        ForeignName("--no-save-optim --no-save-rng", None, "every checkpoint can be resumed from"),
        ForeignName("--ckpt-format --auto-detect-ckpt-format", None, "checkpoints are megatron-core's torch_dist"),
        ForeignName("--async-save", "checkpoint.async_save"),
        ForeignName(
            "--ckpt-fully-parallel-save --no-ckpt-fully-parallel-save --ckpt-fully-parallel-load",
            "checkpoint.fully_parallel_save",
            "for reading too",
        ),
        ForeignName("--dist-ckpt-optim-fully-reshardable", None, "every checkpoint loads in every layout"),
        ForeignName("--dist-ckpt-strictness", None, "a checkpoint must hold exactly the model"),
        ForeignName("--use-checkpoint-args", None, "a run's config.yaml is a whole configuration to copy"),
        ForeignName(
            "--exit-on-missing-checkpoint",
            None,
            "a missing checkpoint.load is always refused",
        ),
        ForeignName("--non-persistent-save-interval", None, "only checkpoint.keep removes checkpoints"),
    ),
    "Logging": (
        ForeignName("--log-interval", "logging.log_interval", "of printed lines alone"),
        ForeignName("--tensorboard-dir", "logging.tensorboard", "in the run's folder"),
        ForeignName("--tensorboard-log-interval", None, "TensorBoard has every step"),
        ForeignName("--wandb-project", "logging.wandb_project"),
        ForeignName("--wandb-exp-name", "logging.wandb_exp_name"),
        ForeignName("--wandb-entity", "logging.wandb_entity"),
        ForeignName("--log-params-norm", "logging.norm_interval", "in steps"),
        ForeignName("--log-throughput", None, "metrics.jsonl always has it"),
        ForeignName(
            "--log-timers-to-tensorboard --timing-log-level",
            None,
            "tools/bench_train.py measures the parts of a step, outside of runs",
        ),
        ForeignName("--logging-level", "logging.folder", "a log file of each rank, at level DEBUG"),
        ForeignName("--log-straggler", "logging.straggler_interval", "on by default"),
        ForeignName("--profile --use-pytorch-profiler", None, "tools/bench_train.py profiles steps, outside of runs"),
    ),
}
"""By the sections of the page."""

MEGATRON_CORE = (
    ForeignName("grad_reduce_in_fp32", None, _FLOAT32_SUMS),
    ForeignName("params_dtype pipeline_dtype", "precision.dtype"),
    ForeignName("fp8_param", None, "weights stored in FP8 would load in no other layers"),
    ForeignName("num_moe_experts", None, _DENSE),
    ForeignName("add_bias_linear", "model.fan.bias", "FAN's bias is the only one"),
    ForeignName("gated_linear_unit activation_func", None, "every MLP is a SwiGLU"),
    ForeignName("apply_rope_fusion", None, "it is fused with the Engine's layers on a GPU"),
    ForeignName("overlap_p2p_comm batch_p2p_comm", None, "the interleaved schedule always overlaps, 1F1B never"),
    ForeignName("bucket_size", "parallel.ddp_bucket_size"),
)
"""Names of megatron-core's own configuration classes, where its arguments have others."""

HUGGING_FACE = (
    ForeignName("learning_rate", "optimizer.lr"),
    ForeignName("adam_epsilon", "optimizer.adam_eps"),
    ForeignName("max_grad_norm", "optimizer.clip_grad"),
    ForeignName("lr_scheduler_type", "schedule.lr_decay_style"),
    ForeignName("warmup_steps", "schedule.lr_warmup_iters"),
    ForeignName("warmup_ratio", "schedule.lr_warmup_fraction"),
    ForeignName("max_steps", "training.train_iters"),
    ForeignName("num_train_epochs num_epochs", "training.epochs", "with data.format sft, else train_iters"),
    ForeignName("per_device_train_batch_size per_device_eval_batch_size", "training.micro_batch_size"),
    ForeignName("train_batch_size batch_size", "training.global_batch_size", "over all replicas"),
    ForeignName(
        "gradient_accumulation_steps",
        "training.global_batch_size",
        "a replica accumulates global_batch_size / (micro_batch_size x replicas) micro batches",
    ),
    ForeignName("eval_steps eval_strategy evaluation_strategy", "training.eval_interval", _IN_STEPS),
    ForeignName("output_dir run_name", "training.run_dir"),
    ForeignName("data_seed", "training.seed"),
    ForeignName("logging_steps", "logging.log_interval"),
    ForeignName("report_to", "logging.tensorboard", "or logging.wandb_project; metrics.jsonl is always written"),
    ForeignName("save_steps save_strategy", "checkpoint.save_interval", _IN_STEPS),
    ForeignName("save_total_limit", "checkpoint.keep"),
    ForeignName("resume_from_checkpoint", "training.run_dir", "the same command resumes from its newest checkpoint"),
    ForeignName("dataloader_num_workers", "data.num_workers"),
    ForeignName("gradient_checkpointing activation_checkpointing", "parallel.recompute_granularity"),
    ForeignName("ddp_timeout", "runtime.distributed_timeout_minutes", "in minutes"),
    ForeignName("use_cpu no_cuda", "runtime.device", "cpu"),
    ForeignName("torch_dtype", "precision.dtype", "fp32 or bf16"),
    ForeignName("attn_implementation", "kernels.attention_backend"),
    ForeignName("torch_compile compile", None, "layers have fused kernels of their own"),
    ForeignName("deepspeed fsdp fsdp_config", None, "the section parallel spreads a model, by megatron-core"),
    ForeignName("num_hidden_layers n_layer", "model.num_layers"),
    ForeignName("n_embd", "model.hidden_size"),
    ForeignName("n_head", "model.num_attention_heads"),
    ForeignName("intermediate_size n_inner", "model.ffn_hidden_size"),
    ForeignName("num_key_value_heads", "model.num_query_groups"),
    ForeignName("max_seq_length max_length block_size n_positions n_ctx", "model.seq_length"),
    ForeignName("rms_norm_eps", "model.layernorm_epsilon"),
    ForeignName("rope_theta", "model.rotary_base"),
    ForeignName("tie_word_embeddings", "model.untie_embeddings_and_output_weights", "the opposite"),
    ForeignName("head_dim", None, "the head size is hidden_size / num_attention_heads"),
    ForeignName("hidden_act activation_type", None, "every MLP is a SwiGLU"),
    ForeignName("attention_bias mlp_bias include_bias", "model.fan.bias", "FAN's bias is the only one"),
    ForeignName("initializer_range init_fn init_std", None, "weights are drawn by the authors' scheme"),
)
"""transformers' names, and those that it shares with OLMo."""

OLMO = (
    ForeignName("d_model", "model.hidden_size"),
    ForeignName("n_layers", "model.num_layers"),
    ForeignName("n_heads", "model.num_attention_heads"),
    ForeignName("n_kv_heads", "model.num_query_groups"),
    ForeignName("mlp_hidden_size", "model.ffn_hidden_size", "half of it: SwiGLU's two halves are counted once"),
    ForeignName(
        "mlp_ratio",
        "model.ffn_hidden_size",
        "in units: mlp_ratio × d_model / 2, for SwiGLU's two halves are counted in it",
    ),
    ForeignName("max_sequence_length sequence_length", "model.seq_length"),
    ForeignName("weight_tying", "model.untie_embeddings_and_output_weights", "the opposite"),
    ForeignName("embedding_size", "model.make_vocab_size_divisible_by", "the padded size follows from it"),
    ForeignName("layer_norm_eps", "model.layernorm_epsilon"),
    ForeignName("layer_norm_type", None, "every norm is an RMSNorm"),
    ForeignName("rope alibi", None, "positions are always rotary"),
    ForeignName("attention_layer_norm qk_norm", None, _PAPER),
    ForeignName("residual_dropout embedding_dropout", None, _NO_DROPOUT),
    ForeignName("device_train_microbatch_size", "training.micro_batch_size"),
    ForeignName("rank_microbatch_size", "training.micro_batch_size", "in samples, not in tokens"),
    ForeignName("global_train_batch_size", "training.global_batch_size"),
    ForeignName("max_duration", "training.train_iters", _IN_STEPS),
    ForeignName("betas", "optimizer.adam_beta1", "and optimizer.adam_beta2"),
    ForeignName("eps", "optimizer.adam_eps"),
    ForeignName("t_warmup warmup", "schedule.lr_warmup_iters", _IN_STEPS),
    ForeignName("t_max", "schedule.lr_decay_iters", _IN_STEPS),
    ForeignName("alpha_f", "schedule.min_lr", "a rate, not a share of the peak"),
    ForeignName("save_folder", "training.run_dir"),
    ForeignName("save_num_checkpoints_to_keep", "checkpoint.keep"),
    ForeignName("load_path", "checkpoint.load", _WEIGHTS_ALONE),
    ForeignName("remote_save_folder", "checkpoint.mirror"),
    ForeignName("save_overwrite", None, "a run never replaces another's folder: name another training.run_dir"),
    ForeignName("console_log_interval", "logging.log_interval"),
    ForeignName("wandb", "logging.wandb_project"),
    ForeignName("evaluators", "evaluation.tasks", "and data.valid_data, evaluation.perplexity"),
    ForeignName("paths", "data.train_data"),
)
"""The names of OLMo and OLMo-core that Hugging Face does not have."""


def answer(plain_name: str) -> str | None:
    """Return what another trainer's setting is here, or why it is not there, as a clause; None: not a name of one."""
    row = row_of(plain_name)
    return None if row is None else row.answer


def row_of(plain_name: str) -> ForeignName | None:
    """The row of a setting of another trainer; None for names of no other."""
    return _by_plain_name().get(plain_name)


def plain(name: str) -> str:
    """A name as somebody gave it (a key, dotted or not; a flag) as an identifier: `--num-layers` is num_layers."""
    return name.rpartition(".")[2].lstrip("-").replace("-", "_")


@functools.cache
def _by_plain_name() -> dict[str, ForeignName]:
    tables = (*MEGATRON_LM.values(), MEGATRON_CORE, HUGGING_FACE, OLMO)
    return {plain(name): row for table in tables for row in table for name in row.names.split()}
