"""The model card of an export, README.md: the model, its use, its training and its conversion.

The training comes from a run's checkpoint, its saved configuration and the metrics in its run's folder. Missing facts
are left out or reported as unknown: nothing is inferred. Only the last part of a path is reported.
"""

import functools
import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fanformer import markdown
from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.manifest import versions
from megatron_fanformer.checkpoint.stored_files import SavedProgress, read_table, saved_progress
from megatron_fanformer.convert.megatron_lm import Run
from megatron_fanformer.convert.name_table import Format, listed
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.hf.configuration_fanformer import OLDEST_TRANSFORMERS
from megatron_fanformer.model.config import FANformerConfig

RECEIPT = "receipt.json"
MAX_SHARD_SIZE = "5GB"
CARD_VERSIONS = ("megatron-fanformer", "megatron-core", "torch", "transformers")
DEGREES = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "dp": "data_parallel_size",
}
ORIGINS: dict[Format, str] = {
    "megatron": "a checkpoint of converted weights",
    "reference": "a checkpoint in the authors' format",
    "hf": "a Hugging Face folder",
}

Rows = list[tuple[str, str]]
Saved = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Extras:
    """Files and texts beside the tensors, and facts for the card that the model's configuration lacks."""

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

# {markdown.as_text(extras.name)}

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


# -- the training


def training_record(format: Format, checkpoint: Path, run: Run | None = None) -> str:
    """Return Markdown for the card: a table of the training, or a sentence that nothing is known about it.

    Args:
        run: configuration and progress of a run of Megatron-LM.

    Raises:
        CorruptError: a checkpoint of ours cannot be read.
    """
    checkpoint = checkpoint.absolute()  # a relative path may not show its run's folder
    rows: Rows = []
    if run is not None:
        rows = _rows(*run, [])
    elif format == "megatron" and (progress := saved_progress(checkpoint, read_table(checkpoint))) is not None:
        rows = _rows(run_folder.saved_config(checkpoint), progress, _loss_rows(checkpoint, progress.step))
    if not rows and format == "megatron" and (averaged := _averaged(checkpoint)):
        return markdown.as_text(f"The weights are an average of the checkpoints {' and '.join(averaged)}.")
    if not rows:
        return (
            f"Not known: the weights were converted from {ORIGINS[format]}, which holds no record of the steps, the "
            "data and the losses of their training."
        )
    return markdown.table(["", ""], ((markdown.as_text(name), markdown.as_text(text)) for name, text in rows))


def _averaged(checkpoint: Path) -> list[str]:
    """Return the checkpoints that `merge` has averaged into this one, as text."""
    receipt = checkpoint.parent.parent / RECEIPT
    sources = run_folder.read_mapping(receipt).get("sources") if receipt.is_file() else None

    def run_name(path_or_url: str) -> str:
        path = Path(path_or_url)
        return path.parent.parent.name if path.parent.name == run_folder.CHECKPOINTS else path.name

    return [
        f"{run_name(str(source.get('path')))} step {source.get('step')} (weight {source.get('weight')})"
        for source in (sources if isinstance(sources, list) else [])
        if isinstance(source, dict)
    ]


def _rows(saved: Saved, progress: SavedProgress, losses: Rows) -> Rows:
    training, schedule, data = (saved.get(section, {}) for section in ("training", "schedule", "data"))
    sequence, planned = saved.get("model", {}).get("seq_length"), training.get("train_iters")
    rate = saved.get("optimizer", {}).get("lr")
    more = f" of {planned:,} planned" if isinstance(planned, int) and planned != progress.step else ""
    rows = [("steps", f"{progress.step:,}{more}")]
    if isinstance(sequence, int):
        rows.append(("tokens", f"{progress.consumed_samples * sequence:,}"))
    if start := saved.get("checkpoint", {}).get("load"):
        rows.append(("started from", f"the weights of {Path(str(start)).name}, whose own training is not counted here"))
    rows += losses
    if "global_batch_size" in training:
        rows.append(("global batch", f"{training['global_batch_size']} sequences of {sequence or '?'} tokens"))
    if rate is not None:
        style, warmup = schedule.get("lr_decay_style"), schedule.get("lr_warmup_iters")
        after = f" after {warmup} steps of warm-up" if warmup else ""
        rows.append(("peak learning rate", f"{rate}{f'; {style}' if style else ''}{after}"))
    if "parallel" in saved:
        rows.append(("layout", _layout(saved)))
    if "seed" in training:
        rows.append(("seed", str(training["seed"])))
    data_sets = {"training data": data.get("train_data")}
    if isinstance(validation := data.get("valid_data"), dict):
        data_sets.update({f"validation data, {name}": words for name, words in validation.items()})
    for name, words in data_sets.items():
        if isinstance(words, list):
            rows.append((name, listed([Path(part).name for word in words for part in str(word).split()])))
    return [*rows, ("split", str(data["split"]))] if data.get("split") else rows


def _layout(saved: Saved) -> str:
    """Return the parallel degrees, optimizer, type and device of a run."""
    parallel = saved.get("parallel", {})
    degrees = ", ".join(f"{short} {parallel.get(name) or 1}" for short, name in DEGREES.items())
    optimizer = "distributed optimizer" if parallel.get("use_distributed_optimizer") else "plain optimizer"
    dtype = saved.get("precision", {}).get("dtype", "?")
    return f"{degrees}; {optimizer}; {dtype} on {saved.get('runtime', {}).get('device', '?')}"


def _loss_rows(checkpoint: Path, step: int) -> Rows:
    """Return the training loss of a step, and each validation set's last loss up to it."""
    metrics = checkpoint.parent.parent / run_folder.METRICS
    is_available = checkpoint.parent.name == run_folder.CHECKPOINTS and metrics.is_file()
    losses: dict[str, tuple[int, float]] = {}
    lines = metrics.read_bytes().split(b"\n") if is_available else []
    for entry in filter(None, map(run_folder.metrics_entry, lines)):
        if (at := entry["step"]) > step:
            continue
        for name, value in entry.items():
            kind, _, dataset = name.partition("/")
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if is_number and kind == run_folder.VALIDATION_LOSS and dataset:
                losses[f"validation loss, {dataset}"] = at, value
            elif is_number and name == "loss" and at == step:
                losses = {"training loss": (at, value), **losses}
    if "training loss" not in losses:
        return [("losses", f"not known: the run's {run_folder.METRICS} was not available, or has no step {step}")]
    return [(name, f"{loss:.4f} nats per token, at step {at:,}") for name, (at, loss) in losses.items()]
