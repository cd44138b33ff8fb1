"""FANformer for transformers, and its registration with the `Auto*` classes.

transformers does not look for models in installed packages. So an exported folder opens without
`trust_remote_code` only in a process that has imported this module:

    import megatron_fanformer.hf  # noqa: F401
    model = AutoModelForCausalLM.from_pretrained(folder)

`import megatron_fanformer` alone does not register: it would import transformers, which takes seconds.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_fanformer import FANformerConfig
from .modeling_fanformer import FANformerForCausalLM, FANformerModel, FANformerPreTrainedModel

__all__ = ["FANformerConfig", "FANformerForCausalLM", "FANformerModel", "FANformerPreTrainedModel"]

# `register_for_auto_class` makes `save_pretrained` copy the code into the folder, so that a fine-tuned model opens with
# `trust_remote_code=True` on machines that do not have this package.
AutoConfig.register(FANformerConfig.model_type, FANformerConfig, exist_ok=True)
FANformerConfig.register_for_auto_class()
for _auto, _model in ((AutoModel, FANformerModel), (AutoModelForCausalLM, FANformerForCausalLM)):
    _auto.register(FANformerConfig, _model, exist_ok=True)
    _model.register_for_auto_class(_auto.__name__)
