"""Builds one pipeline stage of a FANformer; the only module that names GPTModel."""

import dataclasses
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fanformer.model.config import FANformerConfig, PrecisionConfig
from megatron_fanformer.model.initialization import initialize
from megatron_fanformer.model.kernels import DEFAULT_KERNELS, KernelsConfig
from megatron_fanformer.model.layer_spec import block_spec, resolve_transformer_impl
from megatron_fanformer.model.loss_head import LossHead, rule_out_padding
from megatron_fanformer.runtime.parallel import ParallelConfig, RankGrid

OWN_PRECISION_FIELDS = ("dtype", "fp8_fan")  # the others are megatron-core's, by the same names


def transformer_config(
    model: FANformerConfig,
    parallel: ParallelConfig,
    grid: RankGrid,
    dtype: torch.dtype,
    precision: PrecisionConfig | None = None,
    kernels: KernelsConfig = DEFAULT_KERNELS,
) -> TransformerConfig:
    """Return megatron-core's own configuration of the model's layers; only FP8 is read from `precision` here."""
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.kv_channels,
        add_bias_linear=False,
        **model.placement.mlp_fields(on_cpu=grid.device == "cpu"),
        normalization="RMSNorm",
        layernorm_epsilon=model.layernorm_epsilon,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        **_pipeline_fields(parallel, grid),
        context_parallel_size=parallel.context_parallel_size,
        cp_comm_type=parallel.cp_comm_type,
        sequence_parallel=parallel.sequence_parallel,
        recompute_granularity=parallel.recompute_granularity,
        recompute_method=parallel.recompute_method,
        recompute_num_layers=parallel.recompute_num_layers,
        recompute_modules=[module for module in parallel.recompute_modules if module != "fan"],  # ours: see the spec
        gradient_accumulation_fusion=kernels.fuses_gradient_accumulation and grid.has_fused_gradient_kernel,
        # By the Engine's kernel, with the angles in float32. megatron-core's other fusions are for layers that this
        # model does not have: its own softmax, apex's norms, bias and dropout after a layer without either.
        apply_rope_fusion=grid.device != "cpu" and _is_by_engine(kernels),
        fused_single_qkv_rope=kernels.fused_single_qkv_rope,
        attention_backend=AttnBackend[kernels.attention_backend],
        cuda_graph_impl=kernels.cuda_graph_impl,
        deterministic_mode=grid.is_deterministic,
        **_fp8_fields(precision or PrecisionConfig()),
        # Weights are drawn by their global names afterwards. megatron-core's own initialisation must run all the same:
        # it marks the tensor parallel shards, without which the gradient norm counts only one rank's.
        init_method=_leave_as_it_is,
        output_layer_init_method=_leave_as_it_is,
        embedding_init_method=_leave_as_it_is,
        use_cpu_initialization=grid.device == "cpu",
    )


def _pipeline_fields(parallel: ParallelConfig, grid: RankGrid) -> dict[str, Any]:
    is_interleaved = parallel.virtual_stages > 1
    return {
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": parallel.virtual_stages if is_interleaved else None,
        "num_layers_in_first_pipeline_stage": parallel.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": parallel.num_layers_in_last_pipeline_stage,
        # Two ways in which the interleaved schedule gives wrong numbers without an error, both seen over gloo at two
        # stages: outputs are freed while they are still being sent (NCCL holds on to what it sends, gloo does not), and
        # a batched exchange mispairs the messages that wrap around from the last stage to the first.
        "deallocate_pipeline_outputs": not is_interleaved or grid.backend != "gloo",
        "overlap_p2p_comm": is_interleaved,
        "batch_p2p_comm": not is_interleaved,
    }


def _fp8_fields(precision: PrecisionConfig) -> dict[str, Any]:
    fields = {} if precision.fp8 is None else dataclasses.asdict(precision)
    return {name: value for name, value in fields.items() if name not in OWN_PRECISION_FIELDS}


def _is_by_engine(kernels: KernelsConfig) -> bool:
    return resolve_transformer_impl(kernels.transformer_impl) == "transformer_engine"


def _leave_as_it_is(_weight: torch.Tensor) -> None:
    """Initialize nothing."""


class _Stage(GPTModel):
    """A GPTModel that returns the losses of its labels through the chunked loss head, where it has one.

    In evaluation the vocabulary's padding has no probability, as in exports, which have no padding.
    """

    own_tokens: int
    """Number of this rank's first rows of the output layer that are tokens, not padding."""

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        labels_bs, loss_mask_bs = kwargs.get("labels"), kwargs.get("loss_mask")
        if labels_bs is None or not (self.post_process and isinstance(self.output_layer, LossHead)):
            return super()._postprocess(hidden_states, *args, **kwargs)
        losses_sb: torch.Tensor = self.output_layer(
            hidden_states,
            weight=self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None,
            labels_sb=labels_bs.t(),
            loss_mask_sb=None if loss_mask_bs is None else loss_mask_bs.t(),
            columns=self._scored_columns,
        )
        return losses_sb.t().contiguous()

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        rule_out_padding(logits, self._scored_columns)
        losses_bs: torch.Tensor = super().compute_language_model_loss(labels, logits)
        return losses_bs

    @property
    def _scored_columns(self) -> int | None:
        return None if self.training else self.own_tokens


def build_stages(
    model: FANformerConfig,
    parallel: ParallelConfig,
    grid: RankGrid,
    *,
    dtype: torch.dtype,
    seed: int | None,
    precision: PrecisionConfig | None = None,
    kernels: KernelsConfig = DEFAULT_KERNELS,
) -> list[GPTModel]:
    """Build this rank's pipeline stage as its chunks (one, unless the schedule is interleaved).

    They have the initial weights of `seed`, or are uninitialised if that is None. Only FP8 is read from `precision`
    here; None means without.
    """
    precision = precision or PrecisionConfig()
    by_engine = resolve_transformer_impl(kernels.transformer_impl) == "transformer_engine"
    if by_engine:
        from megatron_fanformer.model import te_layers

        if precision.fp8:  # the Engine's scales to update are those of an earlier model here, and its dead groups'
            te_layers.FP8GlobalStateManager.reset()
    config = transformer_config(model, parallel, grid, dtype, precision, kernels)
    chunks = [
        _build_chunk(model, parallel, grid, config, number, kernels, fp8_fan=precision.fp8_fan)
        for number in range(parallel.virtual_stages)
    ]
    for chunk in chunks:
        if grid.device != "cpu":  # where it is made
            chunk.to(grid.torch_device)
        if kernels.fuses_gradient_accumulation and by_engine:
            te_layers.fuse_gradient_accumulation(chunk)
        if seed is not None:
            initialize(sharded_state(chunk, grid), model, seed)
    return chunks


def _build_chunk(
    model: FANformerConfig,
    parallel: ParallelConfig,
    grid: RankGrid,
    config: TransformerConfig,
    number: int,
    kernels: KernelsConfig,
    *,
    fp8_fan: bool,
) -> GPTModel:
    virtual_stage = number if parallel.virtual_stages > 1 else None
    layers = get_num_layers_to_build(config, virtual_stage, grid.groups.pp.rank())
    implementation = resolve_transformer_impl(kernels.transformer_impl)
    chunk = _Stage(
        config=config,
        transformer_layer_spec=block_spec(
            model.fan,
            layers,
            implementation,
            parallel.fan_form,
            fp8_fan=fp8_fan,
            recompute_fan=parallel.recomputes("fan"),
        ),
        vocab_size=model.padded_vocab_size,
        max_sequence_length=model.seq_length,
        pre_process=grid.is_first_stage and number == 0,
        post_process=grid.is_last_stage and number == parallel.virtual_stages - 1,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        pg_collection=grid.groups,
        vp_stage=virtual_stage,
    )
    columns = model.padded_vocab_size // parallel.tensor_model_parallel_size
    chunk.own_tokens = min(max(model.vocab_size - grid.groups.tp.rank() * columns, 0), columns)
    if chunk.post_process and kernels.chunked_loss_head:
        tokens = kernels.loss_chunk_tokens(columns, config.params_dtype.itemsize, on_cpu=grid.device == "cpu")
        LossHead.take_over(chunk.output_layer, tokens)
    return chunk


def sharded_state(chunk: GPTModel, grid: RankGrid) -> dict[str, Any]:
    """Return a chunk's parameters under their global names (one name per layer), as megatron-core's sharded tensors."""
    return chunk.sharded_state_dict(metadata=grid.sharding_metadata)
