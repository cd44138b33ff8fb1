"""Builds one pipeline stage of a FANformer; the only namer of GPTModel."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.model.initialization import initialize
from megatron_fanformer.model.layer_spec import block_spec, resolve_transformer_impl
from megatron_fanformer.runtime.parallel import ParallelConfig, RankGrid


def transformer_config(
    model: FANformerConfig, parallel: ParallelConfig, grid: RankGrid, dtype: torch.dtype
) -> TransformerConfig:
    """megatron-core's own configuration of the model's layers."""
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.kv_channels,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=True,
        normalization="RMSNorm",
        layernorm_epsilon=model.layernorm_epsilon,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        deallocate_pipeline_outputs=True,
        # Weights are drawn by their global names afterwards. megatron-core's own initialisation must run all the same:
        # it marks the tensor parallel shards, without which the gradient norm counts one rank's alone.
        init_method=_leave_as_it_is,
        output_layer_init_method=_leave_as_it_is,
        embedding_init_method=_leave_as_it_is,
        use_cpu_initialization=grid.device == "cpu",
    )


def _leave_as_it_is(_weight: torch.Tensor) -> None:
    """An initialisation that does nothing."""


def build_stage(
    model: FANformerConfig,
    parallel: ParallelConfig,
    grid: RankGrid,
    *,
    dtype: torch.dtype,
    seed: int | None,
) -> GPTModel:
    """This rank's pipeline stage, with the initial weights of `seed`, or uninitialised where that is None.

    Layers are spread evenly over the stages: `num_layers` is a multiple of the pipeline parallel size.
    """
    config = transformer_config(model, parallel, grid, dtype)
    layers = model.num_layers // parallel.pipeline_model_parallel_size
    implementation = resolve_transformer_impl(parallel.transformer_impl)
    stage = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(model.fan, layers, implementation),
        vocab_size=model.padded_vocab_size,
        max_sequence_length=model.seq_length,
        pre_process=grid.is_first_stage,
        post_process=grid.is_last_stage,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        pg_collection=grid.groups,
    )
    stage.to(grid.torch_device)
    if seed is not None:
        initialize(sharded_state(stage, grid), model, seed)
    return stage


def sharded_state(stage: GPTModel, grid: RankGrid) -> dict[str, Any]:
    """A stage's parameters under their global names (one name a layer), as megatron-core's sharded tensors."""
    return stage.sharded_state_dict(metadata=grid.sharding_metadata)
