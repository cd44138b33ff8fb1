"""The model card of an export, README.md: what the model is, how to run it, how it was trained, and how it got here."""

import functools
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fanformer.checkpoint.manifest import versions
from megatron_fanformer.convert.verb import MAX_SHARD_SIZE
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.hf.configuration_fanformer import OLDEST_TRANSFORMERS
from megatron_fanformer.markdown import as_text
from megatron_fanformer.model.config import FANformerConfig

RECEIPT = "receipt.json"
CARD_VERSIONS = ("megatron-fanformer", "megatron-core", "torch", "transformers")


@dataclass(frozen=True, kw_only=True)
class Extras:
    """Files and texts that go beside the tensors, and facts for the card that the model's configuration lacks."""

    name: str
    """The model's name on the card: its folder's name."""
    tokenizer: Path | None = None
    eod_id: int | None = None
    """The id that ends a document; None: the tokenizer's own."""
    max_shard_size: str = MAX_SHARD_SIZE
    training: str = "Not known."
    """Markdown on how the model was trained."""
    chat_template: str | None = None
    """The chat template in Jinja; left out where there is no tokenizer."""

    @functools.cached_property
    def end_of_text_id(self) -> int | None:
        """Return the id that ends a document: as stated, or the tokenizer's."""
        return load_tokenizer(self.tokenizer, eod_id=self.eod_id).eod_id if self.tokenizer else self.eod_id


def model_card(config: FANformerConfig, extras: Extras) -> str:
    """Return the card as Markdown; `receipt_section` follows it."""
    is_fanformer = config.placement.is_fanformer
    fan = f"FAN with p_ratio {config.fan.p_ratio:g}, placement {config.fan.placement}" if is_fanformer else "no FAN"
    kind = "FANformer" if is_fanformer else "Transformer"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- fanformer
---

# {as_text(extras.name)}

A {kind} language model ("Reasoning is Periodicity?", NeurIPS 2025): \
{config.num_layers} layers, hidden size {config.hidden_size}, {config.num_attention_heads} heads, {fan}, \
vocabulary {config.vocab_size}, sequences of {config.seq_length} tokens.

## Use

It needs transformers {OLDEST_TRANSFORMERS} or later. The model's code is in this folder; `trust_remote_code` runs it.\
{_ASKED if extras.tokenizer else ""}

{_usage(extras)}
## Training

{extras.training}
"""


_ASKED = """ \
The tokenizer has no code, and is passed the same: transformers reads `config.json` before any tokenizer, finds there \
that the model has code, and asks whether to run it."""


def _usage(extras: Extras) -> str:
    name = json.dumps(extras.name)
    if extras.tokenizer is None:
        return f"""```python
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({name}, trust_remote_code=True)
print(model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=50))
```

There is no tokenizer in this folder: pass the ids of the one that the model was trained with.
"""
    return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name}, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained({name}, trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```

In batches, prompts are padded on the left, and the attention mask is passed on: \
`inputs = tokenizer(prompts, padding=True, return_tensors="pt")` gives both, and `**inputs` passes them.
{_CHAT if extras.chat_template is not None else ""}
[lm-eval](https://pypi.org/project/lm-eval/) scores it:

```bash
lm_eval --model hf --model_args {shlex.quote(f"pretrained={extras.name},trust_remote_code=True")} --tasks lambada_openai
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
    """Return the card's section on the conversion, from the receipt; None: there is none."""
    known = versions()
    made_with = ", ".join(f"{name} {known[name]}" for name in CARD_VERSIONS)
    if content is None:
        verification = "The conversion was not verified: there is no receipt."
    else:
        rounded = content["checks"]["round_trip"]["rounded_to"]
        same = f"the same when rounded to {rounded.removeprefix('torch.')}" if rounded else "the same bit for bit"
        verification = (
            f"The weights were converted from a {content['source']['format']} checkpoint and compared with it: {same}, "
            f"and their logits in float32 differ by at most {content['checks']['logits']['max_abs_error']:.1e}. The "
            f"receipt, [{RECEIPT}]({RECEIPT}), is in this folder."
        )
    return f"\n## Conversion\n\n{verification} Converted with {made_with}.\n"
