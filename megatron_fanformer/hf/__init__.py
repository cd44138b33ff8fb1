"""FANformer for transformers, and its registration with the `Auto*` classes.

transformers does not look for models in installed packages, so an exported folder opens without
`trust_remote_code` in a process that has imported this module:

    import megatron_fanformer.hf  # noqa: F401
    model = AutoModelForCausalLM.from_pretrained(folder)

`import megatron_fanformer` alone does not register: it would import transformers, which takes seconds.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_fanformer import FANformerConfig
from .modeling_fanformer import FANformerForCausalLM, FANformerModel, FANformerPreTrainedModel

__all__ = [
    "FANformerConfig",
    "FANformerForCausalLM",
    "FANformerModel",
    "FANformerPreTrainedModel",
    "register_auto_classes",
]


def register_auto_classes() -> None:
    """Make the model type `fanformer` known to AutoConfig, AutoModel and AutoModelForCausalLM; repeatable.

    It also marks the classes for `save_pretrained`, which then copies their code next to the weights: a
    fine-tuned model opens with `trust_remote_code=True` where this package is not installed.
    """
    AutoConfig.register(FANformerConfig.model_type, FANformerConfig, exist_ok=True)
    FANformerConfig.register_for_auto_class()
    AutoModel.register(FANformerConfig, FANformerModel, exist_ok=True)
    FANformerModel.register_for_auto_class("AutoModel")
    AutoModelForCausalLM.register(FANformerConfig, FANformerForCausalLM, exist_ok=True)
    FANformerForCausalLM.register_for_auto_class("AutoModelForCausalLM")


register_auto_classes()
