"""The model card of an export, README.md: the model, its use, the length of its training.

Missing facts are left out: nothing is inferred.
"""

import functools
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from megatron_fanformer import __version__, markdown
from megatron_fanformer.checkpoint.stored_files import SavedProgress
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.hf.configuration_fanformer import OLDEST_TRANSFORMERS
from megatron_fanformer.model.config import FANformerConfig

RECEIPT = "receipt.json"
MAX_SHARD_SIZE = "5GB"


@dataclass(frozen=True, kw_only=True)
class Extras:
    """Files and texts beside the tensors, and facts for the card that the model's configuration lacks."""

    name: str  # the model's name on the card, which is the name of its folder
    tokenizer: Path | None = None
    eod_id: int | None = None  # the id that ends a document; None: the tokenizer's own
    max_shard_size: str = MAX_SHARD_SIZE
    progress: SavedProgress | None = None  # the length of the training; None: not known
    chat_template: str | None = None  # in Jinja; not written if there is no tokenizer

    @functools.cached_property
    def end_of_text_id(self) -> int | None:
        """Return the id that ends a document: `eod_id` or, if that is None, the tokenizer's."""
        return load_tokenizer(self.tokenizer, eod_id=self.eod_id).eod_id if self.tokenizer else self.eod_id


def model_card(config: FANformerConfig, extras: Extras) -> str:
    """Return the card as Markdown."""
    is_fanformer = config.placement.is_fanformer
    fan = f"FAN with p_ratio {config.fan.p_ratio:g}, placement {config.fan.placement}" if is_fanformer else "no FAN"
    trained = ""
    if extras.progress:
        tokens = extras.progress.consumed_samples * config.seq_length
        trained = f" Its last run took {extras.progress.step:,} steps, over {tokens:,} tokens."
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- fanformer
---

# {markdown.as_text(extras.name)}

A {"FANformer" if is_fanformer else "Transformer"} language model ("Reasoning is Periodicity?", NeurIPS 2025): \
{config.num_layers} layers, hidden size {config.hidden_size}, {config.num_attention_heads} heads, {fan}, \
vocabulary {config.vocab_size}, sequences of {config.seq_length} tokens.{trained} Converted by megatron-fanformer \
{__version__}; `{RECEIPT}`, if it is here, has the checks of the conversion.

## Use

It needs transformers {OLDEST_TRANSFORMERS} or later. The model's code is in this folder; `trust_remote_code` runs it.

{_usage(extras)}"""


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

The tokenizer has no code, but transformers wants `trust_remote_code` for it, too. Batches of prompts (`padding=True`) \
are padded on the left.
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
