"""Builds one pipeline stage of a FANformer from the newest model class of the installed megatron-core."""

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
from megatron_fanformer.model.layer_spec import LayerImpl, final_norm, layer_spec, resolve_transformer_impl
from megatron_fanformer.model.loss_head import LossHead
from megatron_fanformer.model.stages import HAS_HYBRID_MODEL, GPTStage, Layers, Stage
from megatron_fanformer.runtime.layout import ParallelConfig, layout_chunks
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.runtime.seeding import initialize_by_name, truncated_normal


def transformer_config(
    model: FANformerConfig,
    parallel: ParallelConfig,
    grid: RankGrid,
    dtype: torch.dtype,
    precision: PrecisionConfig | None = None,
    kernels: KernelsConfig = DEFAULT_KERNELS,
    *,
    has_stage_sizes: bool = True,
) -> TransformerConfig:
    """Return megatron-core's configuration of the model's layers.

    Args:
        precision: only the fields of FP8 are read; None: no FP8.
        has_stage_sizes: whether to state each stage's number of layers, which `HybridStage` has in its pattern instead.
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
        **(_stage_sizes(parallel) if has_stage_sizes else {}),
        context_parallel_size=parallel.context_parallel_size,
        cp_comm_type=parallel.cp_comm_type,
        sequence_parallel=parallel.sequence_parallel,
        recompute_granularity=parallel.recompute_granularity,
        recompute_method=parallel.recompute_method,
        recompute_num_layers=parallel.recompute_num_layers,
        recompute_modules=[name for name in parallel.recompute_modules if name != "fan"],  # FAN recomputes itself
        gradient_accumulation_fusion=bool(kernels.gradient_accumulation_fusion) and grid.has_fused_gradient_kernel,
        # The Engine's kernel, with the angles in float32. megatron-core's other fusions are for layers that this model
        # does not have: megatron-core's softmax, apex's norms, bias and dropout.
        apply_rope_fusion=grid.device != "cpu" and resolve_transformer_impl(kernels.transformer_impl) != "local",
        fused_single_qkv_rope=kernels.fused_single_qkv_rope,
        softmax_scale=model.rope_scaling.softmax_scale(model.kv_channels),
        attention_backend=AttnBackend[kernels.attention_backend],
        cuda_graph_impl=kernels.cuda_graph_impl,
        deterministic_mode=grid.is_deterministic,
        **_fp8_fields(precision or PrecisionConfig()),
        # `initialize` fills in the weights afterwards. megatron-core's initialization must run all the same: it marks
        # the tensor parallel shards, and the gradient norm would count only one rank's shard without the marks.
        init_method=_no_initialization,
        output_layer_init_method=_no_initialization,
        embedding_init_method=_no_initialization,
        use_cpu_initialization=grid.device == "cpu",
    )


def _pipeline_fields(parallel: ParallelConfig, grid: RankGrid) -> dict[str, Any]:
    """Return the fields of the pipeline's schedule and communication."""
    is_interleaved = parallel.virtual_stages > 1
    return {
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": parallel.virtual_stages if is_interleaved else None,
        # Over gloo the interleaved schedule gave wrong numbers without an error, for two reasons: outputs are freed
        # while they are still being sent (NCCL keeps the buffers that it sends, gloo does not), and a batched exchange
        # mispairs the messages from the last of two stages to the first.
        "deallocate_pipeline_outputs": not is_interleaved or grid.backend != "gloo",
        "overlap_p2p_comm": is_interleaved,
        "batch_p2p_comm": not is_interleaved,
        # True waits for the device after every exchange: torch before August 2022 had a race (pytorch/pytorch#82450).
        "batch_p2p_sync": False,
    }


def _stage_sizes(parallel: ParallelConfig) -> dict[str, Any]:
    """Return the fields that state how many layers the stages have; all are None if stages have equal numbers."""
    text = parallel.pipeline_model_parallel_layout
    return {
        # Parsed and written again, because megatron-core stops reading at a space.
        "pipeline_model_parallel_layout": None if text is None else "|".join(layout_chunks(text)),
        "num_layers_in_first_pipeline_stage": parallel.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": parallel.num_layers_in_last_pipeline_stage,
    }


def _fp8_fields(precision: PrecisionConfig) -> dict[str, Any]:
    """Return the fields of FP8, which have the same names in megatron-core; an empty dict without FP8."""
    fields = {} if precision.fp8 is None else dataclasses.asdict(precision)
    return {name: fields[name] for name in fields.keys() - {"dtype", "grad_reduce_in_fp32", "fp8_fan"}}  # ours alone


def _no_initialization(_weight: torch.Tensor) -> None:
    """Leave a weight as it is: `initialize` fills in all weights later."""


def stage_class() -> type[Stage]:
    """Return the class of stages that are made of the newest model class in the installed megatron-core."""
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
    """Build the chunks of this rank's pipeline stage (one, unless the schedule is interleaved).

    Args:
        seed: of the initial weights; None leaves the weights uninitialized.
        precision: only the fields of FP8 are read; None: no FP8.
        stage_type: None: `stage_class()`.
        z_loss_coefficient: see `LossHead.take_over`.

    Raises InputError if there is a z-loss, and the last stage's head is not a `LossHead`.
    """
    precision, stage_type = precision or PrecisionConfig(), stage_type or stage_class()
    implementation = resolve_transformer_impl(kernels.transformer_impl)
    if implementation == "transformer_engine":
        from megatron_fanformer.model import te_layers

        if precision.fp8:  # forget an earlier model's scales and process groups, which are gone
            te_layers.FP8GlobalStateManager.reset()
    config = transformer_config(
        model, parallel, grid, dtype, precision, kernels, has_stage_sizes=stage_type.has_stage_sizes_in_config
    )
    columns = model.padded_vocab_size // parallel.tensor_model_parallel_size  # of logits, on this rank
    chunks = []
    for layers in _layers_of_chunks(model, parallel, grid, implementation, fp8_fan=precision.fp8_fan):
        chunk = _build_chunk(stage_type, layers, model, parallel, grid, config)
        chunk.token_columns = min(max(model.vocab_size - grid.groups.tp.rank() * columns, 0), columns)  # not padding
        if chunk.post_process:
            _set_loss_head(chunk, columns, kernels, z_loss_coefficient, grid)
        if grid.device != "cpu":
            chunk.to(grid.torch_device)
        if kernels.gradient_accumulation_fusion and implementation == "transformer_engine":
            te_layers.fuse_gradient_accumulation(chunk)
        chunks.append(chunk)
    if seed is not None:
        for chunk in chunks:
            initialize(sharded_state(chunk, grid), model, seed)
    return chunks


def _layers_of_chunks(
    model: FANformerConfig, parallel: ParallelConfig, grid: RankGrid, implementation: LayerImpl, *, fp8_fan: bool
) -> list[Layers]:
    """Return the layers of each chunk of this rank's stage."""
    spec = layer_spec(
        model.fan,
        implementation,
        parallel.fan_form,
        fp8_fan=fp8_fan,
        recompute_fan=parallel.recomputes("fan"),
        qk_layernorm=model.qk_layernorm,
        heads_over=grid.groups.cp if grid.exchanges_heads else None,
    )
    segments = parallel.segments(model.num_layers)
    assert segments is not None, "model.layout_rules refuses layers that do not divide"
    norm, stage = final_norm(implementation), grid.groups.pp.rank()
    return [Layers(spec, norm, segments, number, stage) for number in range(parallel.virtual_stages)]


def _build_chunk(
    stage_type: type[Stage],
    layers: Layers,
    model: FANformerConfig,
    parallel: ParallelConfig,
    grid: RankGrid,
    config: TransformerConfig,
) -> Any:
    """Build one chunk by megatron-core; `build_stages` then sets the loss head and the weights."""
    groups = grid.groups
    if grid.exchanges_heads:  # only attention may see the ranks of `cp`: the model would cut the rotary positions
        groups = copy.copy(groups)
        groups.cp = groups.ep  # this rank alone: the model has no experts
    chunk: Any = stage_type(
        config=config,
        **stage_type.arguments(layers),
        vocab_size=model.padded_vocab_size,
        max_sequence_length=model.seq_length,
        pre_process=grid.is_first_stage and layers.chunk == 0,
        post_process=grid.is_last_stage and layers.chunk == parallel.virtual_stages - 1,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        pg_collection=groups,
        vp_stage=layers.chunk if parallel.virtual_stages > 1 else None,
    )
    if model.rope_scaling.is_scaled:  # `inv_freq` gives all angles, in every layout and with a cache
        rotary = chunk.rotary_pos_emb
        rotary.inv_freq = model.rope_scaling.frequencies(model.rotary_base, model.kv_channels).to(rotary.inv_freq)
    return chunk


def _set_loss_head(stage: Any, columns: int, kernels: KernelsConfig, z_loss_coefficient: float, grid: RankGrid) -> None:
    """Turn a stage's output layer into the configured loss head, in place; raises as `build_stages` says."""
    head = stage.output_layer
    if kernels.chunked_loss_head:
        tokens = kernels.loss_chunk_tokens(columns, stage.config.params_dtype.itemsize, on_cpu=grid.device == "cpu")
        LossHead.take_over(head, tokens, z_loss_coefficient)
    if z_loss_coefficient and not isinstance(head, LossHead):
        raise InputError(
            f"training.z_loss_coefficient is {z_loss_coefficient}, but megatron-core's {type(head).__name__} has no "
            "z-loss; set it to 0, or kernels.chunked_loss_head to true"
        )


def sharded_state(chunk: Any, grid: RankGrid) -> dict[str, Any]:
    """Return a chunk's parameters as megatron-core's sharded tensors, by global names (one name per layer)."""
    return chunk.sharded_state_dict(metadata=grid.sharding_metadata)


# -- initial weights

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def initialize(sharded_state: dict[str, Any], config: FANformerConfig, seed: int) -> None:
    """Fill every parameter of a stage's sharded state dict with its slice of the initial weights of `seed`."""
    initialize_by_name(sharded_state, seed, partial(draw_weight, config))


def draw_weight(config: FANformerConfig, name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return the whole initial tensor with this global name, in float32."""
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if "layernorm" in name:
        return torch.ones(shape)
    return truncated_normal(shape, initial_std(config, name), generator)


def initial_std(config: FANformerConfig, name: str) -> float:
    """Return the standard deviation of initial weights; in maps back to the residual stream, it falls with depth."""
    input_width_by_ending = {"linear_proj.weight": config.hidden_size, "linear_fc2.weight": config.ffn_hidden_size}
    width = next((width for ending, width in input_width_by_ending.items() if name.endswith(ending)), None)
    if width is None:
        return (1 / config.hidden_size) ** 0.5
    match = _LAYER.search(name)
    assert match, f"{name} is not a layer's weight"
    return (1 / (2 * width * (int(match[1]) + 1))) ** 0.5  # names count layers from 0
