"""The model card of an export, README.md: what the model is, how to run it, how it was trained, and how it got here."""

import json
import shlex
from typing import Any, NamedTuple

from megatron_fanformer.checkpoint.versions import versions
from megatron_fanformer.hf.configuration_fanformer import OLDEST_TRANSFORMERS
from megatron_fanformer.markdown import as_text
from megatron_fanformer.model.config import FANformerConfig

RECEIPT = "receipt.json"
TOLD_VERSIONS = ("megatron-fanformer", "megatron-core", "torch", "transformers")


class Card(NamedTuple):
    """Describe what a card says that the model's configuration does not."""

    name: str
    """What the model is called: its folder's name."""
    training: str
    """Markdown, about how it was trained."""
    has_tokenizer: bool = False
    has_padding: bool = False
    """Whether the tokenizer has a piece to pad with."""
    has_chat_template: bool = False


def model_card(config: FANformerConfig, card: Card) -> str:
    """The card as Markdown; `receipt_section` follows it."""
    is_fanformer = config.placement.is_fanformer
    fan = f"FAN with p_ratio {config.fan.p_ratio:g}, placement {config.fan.placement}" if is_fanformer else "no FAN"
    kind = "FANformer" if is_fanformer else "Transformer"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- fanformer
---

# {as_text(card.name)}

A {kind} language model ("Reasoning is Periodicity?", NeurIPS 2025): \
{config.num_layers} layers, hidden size {config.hidden_size}, {config.num_attention_heads} heads, {fan}, \
vocabulary {config.vocab_size}, sequences of {config.seq_length} tokens.

## Use

It needs transformers {OLDEST_TRANSFORMERS} or later. The model's code is in this folder; `trust_remote_code` runs it.

{_usage(card)}
## Training

{card.training}
"""


def _usage(card: Card) -> str:
    name = json.dumps(card.name)
    if not card.has_tokenizer:
        return f"""```python
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({name}, trust_remote_code=True)
print(model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=50))
```

There is no tokenizer in this folder: pass the ids of the one that the model was trained with.
"""
    chat = "" if not card.has_chat_template else _CHAT
    pad = "" if card.has_padding else " The tokenizer has no padding token: set `tokenizer.pad_token` first."
    return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name}, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained({name}, trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```

In batches, prompts are padded on the left, and the attention mask is passed on: \
`inputs = tokenizer(prompts, padding=True, return_tensors="pt")` gives both, and `**inputs` passes them.{pad}
{chat}
[lm-eval](https://pypi.org/project/lm-eval/) scores it:

```bash
lm_eval --model hf --model_args {shlex.quote(f"pretrained={card.name},trust_remote_code=True")} --tasks lambada_openai
```
"""


_CHAT = """
It was fine-tuned on chats, whose form is in `chat_template.jinja`:

```python
messages = [{"role": "user", "content": "Hello"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
answer = model.generate(**inputs, max_new_tokens=200)[0, inputs.input_ids.shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
```
"""


def receipt_section(content: dict[str, Any] | None) -> str:
    """Return how the weights were converted, and what the receipt next to the card says; None: there is none."""
    known = versions()
    made_with = ", ".join(f"{name} {known[name]}" for name in TOLD_VERSIONS)
    if content is None:
        said = "The conversion was not verified: there is no receipt."
    else:
        rounded = content["checks"]["round_trip"]["rounded_to"]
        same = f"the same when rounded to {rounded.removeprefix('torch.')}" if rounded else "the same bit for bit"
        said = (
            f"The weights were converted from a {content['source']['format']} checkpoint and compared with it: {same}, "
            f"and their logits in float32 differ by at most {content['checks']['logits']['max_abs_error']:.1e}. The "
            f"receipt, [{RECEIPT}]({RECEIPT}), is in this folder."
        )
    return f"\n## Conversion\n\n{said} Converted with {made_with}.\n"
