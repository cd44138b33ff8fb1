"""Builds one pipeline stage of a FANformer, of the model class that the installed megatron-core goes on with."""

import copy
import dataclasses
import re
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fanformer.errors import InputError
from megatron_fanformer.model.config import DEFAULT_KERNELS, FANformerConfig, KernelsConfig, PrecisionConfig
from megatron_fanformer.model.layer_spec import final_norm, layer_spec, resolve_transformer_impl
from megatron_fanformer.model.loss_head import LossHead
from megatron_fanformer.model.stages import HAS_HYBRID_MODEL, GPTStage, Layers, Stage
from megatron_fanformer.runtime.layout import ParallelConfig, layout_chunks
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.runtime.seeding import initialize_by_name, truncated_normal

OWN_PRECISION_FIELDS = ("dtype", "grad_reduce_in_fp32", "fp8_fan")  # the others are megatron-core's, by the same names


def transformer_config(
    model: FANformerConfig,
    parallel: ParallelConfig,
    grid: RankGrid,
    dtype: torch.dtype,
    precision: PrecisionConfig | None = None,
    kernels: KernelsConfig = DEFAULT_KERNELS,
    *,
    has_boundaries: bool = True,
) -> TransformerConfig:
    """Return megatron-core's own configuration of the model's layers; only FP8 is read from `precision` here.

    Args:
        has_boundaries: whether it states how many layers the first and the last stage have.
    """
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
        qk_layernorm=model.qk_layernorm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        **_pipeline_fields(parallel, grid),
        **(_boundaries(parallel) if has_boundaries else {}),
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
        softmax_scale=model.rope_scaling.softmax_scale(model.kv_channels),
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
        # Two ways in which the interleaved schedule gives wrong numbers without an error, both seen over gloo at two
        # stages: outputs are freed while they are still being sent (NCCL keeps the buffers it sends, gloo does not),
        # and a batched exchange mispairs the messages that wrap around from the last stage to the first.
        "deallocate_pipeline_outputs": not is_interleaved or grid.backend != "gloo",
        "overlap_p2p_comm": is_interleaved,
        "batch_p2p_comm": not is_interleaved,
        # A wait for the device after every exchange, for a race in torch of before August 2022 (pytorch/pytorch#82450).
        "batch_p2p_sync": False,
    }


def _boundaries(parallel: ParallelConfig) -> dict[str, Any]:
    text = parallel.pipeline_model_parallel_layout
    return {
        # As this project has read it: megatron-core's own reading stops at spaces.
        "pipeline_model_parallel_layout": None if text is None else "|".join(layout_chunks(text)),
        "num_layers_in_first_pipeline_stage": parallel.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": parallel.num_layers_in_last_pipeline_stage,
    }


def _fp8_fields(precision: PrecisionConfig) -> dict[str, Any]:
    fields = {} if precision.fp8 is None else dataclasses.asdict(precision)
    return {name: value for name, value in fields.items() if name not in OWN_PRECISION_FIELDS}


def _is_by_engine(kernels: KernelsConfig) -> bool:
    return resolve_transformer_impl(kernels.transformer_impl) == "transformer_engine"


def _leave_as_it_is(_weight: torch.Tensor) -> None:
    pass


def stage_class() -> type[Stage]:
    """Return the model class that the installed megatron-core goes on with."""
    if HAS_HYBRID_MODEL:
        from megatron_fanformer.model.hybrid_spec import HybridStage

        return HybridStage
    return GPTStage


def build_stages(
    model: FANformerConfig,
    parallel: ParallelConfig,
    grid: RankGrid,
    *,
    dtype: torch.dtype,
    seed: int | None,
    precision: PrecisionConfig | None = None,
    kernels: KernelsConfig = DEFAULT_KERNELS,
    stage_type: type[Stage] | None = None,
    z_loss_coefficient: float = 0.0,
) -> list[Stage]:
    """Build this rank's pipeline stage as its chunks (one, unless the schedule is interleaved).

    They have the initial weights of `seed`, or are uninitialised if that is None. Only FP8 is read from `precision`
    here; None means without.

    Args:
        z_loss_coefficient: see `LossHead.take_over`; the last stage must have that head.
        stage_type: None: `stage_class()`.
    """
    precision, stage_type = precision or PrecisionConfig(), stage_type or stage_class()
    by_engine = _is_by_engine(kernels)
    if by_engine:
        from megatron_fanformer.model import te_layers

        if precision.fp8:  # the Engine's scales to update are those of an earlier model here, and its dead groups'
            te_layers.FP8GlobalStateManager.reset()
    config = transformer_config(
        model, parallel, grid, dtype, precision, kernels, has_boundaries=stage_type.has_boundaries_in_config
    )
    chunks = [
        _build_chunk(
            *(stage_type, model, parallel, grid, config, number, kernels),
            fp8_fan=precision.fp8_fan,
            z_loss_coefficient=z_loss_coefficient,
        )
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
    stage_type: type[Stage],
    model: FANformerConfig,
    parallel: ParallelConfig,
    grid: RankGrid,
    config: TransformerConfig,
    number: int,
    kernels: KernelsConfig,
    *,
    fp8_fan: bool,
    z_loss_coefficient: float,
) -> Stage:
    segments = parallel.segments(model.num_layers)
    assert segments is not None, "model.layout_rules refuses layers that do not divide"
    implementation = resolve_transformer_impl(kernels.transformer_impl)
    spec = layer_spec(
        model.fan,
        implementation,
        parallel.fan_form,
        fp8_fan=fp8_fan,
        recompute_fan=parallel.recomputes("fan"),
        qk_layernorm=model.qk_layernorm,
        heads_over=grid.groups.cp if grid.exchanges_heads else None,
    )
    groups = grid.groups
    if grid.exchanges_heads:  # nothing else in the stage is to know of context parallelism
        groups = copy.copy(groups)
        groups.cp = groups.ep  # of experts, which the model has not: this rank alone
    layers = Layers(spec, final_norm(implementation), segments, number, grid.groups.pp.rank())
    chunk: Any = stage_type(
        config=config,
        **stage_type.arguments(layers),
        vocab_size=model.padded_vocab_size,
        max_sequence_length=model.seq_length,
        pre_process=grid.is_first_stage and number == 0,
        post_process=grid.is_last_stage and number == parallel.virtual_stages - 1,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        pg_collection=groups,
        vp_stage=number if parallel.virtual_stages > 1 else None,
    )
    if model.rope_scaling.is_scaled:  # megatron-core computes angles of these, in every layout and of every cache
        rotary = chunk.rotary_pos_emb
        rotary.inv_freq = model.rope_scaling.frequencies(model.rotary_base, model.kv_channels).to(rotary.inv_freq)
    columns = model.padded_vocab_size // parallel.tensor_model_parallel_size
    chunk.own_tokens = min(max(model.vocab_size - grid.groups.tp.rank() * columns, 0), columns)
    if chunk.post_process and kernels.chunked_loss_head:
        tokens = kernels.loss_chunk_tokens(columns, config.params_dtype.itemsize, on_cpu=grid.device == "cpu")
        LossHead.take_over(chunk.output_layer, tokens, z_loss_coefficient)
    if z_loss_coefficient and chunk.post_process and not isinstance(chunk.output_layer, LossHead):
        raise InputError(
            f"training.z_loss_coefficient is {z_loss_coefficient}, but megatron-core's "
            f"{type(chunk.output_layer).__name__} has no z-loss; set it to 0, or kernels.chunked_loss_head to true"
        )
    return chunk


def sharded_state(chunk: Any, grid: RankGrid) -> dict[str, Any]:
    """Return a chunk's parameters under their global names (one name per layer), as megatron-core's sharded tensors."""
    return chunk.sharded_state_dict(metadata=grid.sharding_metadata)


# -- initial weights


_LAYER = re.compile(r"\blayers\.(\d+)\.")


def initialize(sharded_state: dict[str, Any], config: FANformerConfig, seed: int) -> None:
    """Give every parameter of a stage's sharded state dict its slice of the initial model of `seed`."""
    initialize_by_name(sharded_state, seed, partial(draw_weight, config))


def draw_weight(config: FANformerConfig, name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return the whole initial tensor of that global name, in float32."""
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if "layernorm" in name:
        return torch.ones(shape)
    return truncated_normal(shape, initial_std(config, name), generator)


def initial_std(config: FANformerConfig, name: str) -> float:
    """Return the standard deviation of the matrix of that global name."""
    widths = {"linear_proj.weight": config.hidden_size, "linear_fc2.weight": config.ffn_hidden_size}
    width = next((width for ending, width in widths.items() if name.endswith(ending)), None)
    if width is None:
        return (1 / config.hidden_size) ** 0.5
    match = _LAYER.search(name)
    assert match, f"{name} is not a layer's weight"
    return (1 / (2 * width * (int(match[1]) + 1))) ** 0.5
