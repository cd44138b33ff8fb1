from megatron_fanformer.model.layer_spec import FANConfig, layer_spec

my_layer_spec = layer_spec(FANConfig(p_ratio=0.125), qk_layernorm=True)
