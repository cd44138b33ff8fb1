"""Generation: with a cache and without, of either kind, padded in batches, by every strategy, and compiled."""

import pytest
import torch
from torch.nn import functional as F
from transformers import ContinuousBatchingConfig, GenerationConfig, StaticCache

from megatron_fanformer.hf.modeling_fanformer import CACHE_NAME
from tests.hf.models import PLACEMENTS, build, prompts, some_ids

GREEDY = {"do_sample": False, "pad_token_id": 0}
FLOAT32_LOGITS = 1e-4  # logits of order 10, summed in another order


@pytest.fixture(params=PLACEMENTS)
def fields(request):
    return PLACEMENTS[request.param]


@torch.no_grad()
def greedy_without_cache(model, ids, steps):
    """Decoded here, by whole forwards alone."""
    for _ in range(steps):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids


def left_padded(prompts, length=11):
    """The batch of prompts, and its attention mask."""
    pads = [length - len(prompt) for prompt in prompts]
    batch = torch.stack([F.pad(prompt, (pad, 0)) for prompt, pad in zip(prompts, pads, strict=True)])
    mask = torch.stack([F.pad(torch.ones_like(prompt), (pad, 0)) for prompt, pad in zip(prompts, pads, strict=True)])
    return batch, mask


@pytest.mark.parametrize("name", sorted({CACHE_NAME, "past_key_values"}))
def test_logits_from_the_cache_are_those_of_the_whole(fields, name):
    model, ids = build(**fields), some_ids()
    first = model(ids[:, :7], use_cache=True)
    second = model(ids[:, 7:], **{name: first[CACHE_NAME]})
    joined = torch.cat([first.logits, second.logits], dim=1)
    assert (joined - model(ids).logits).abs().max() < FLOAT32_LOGITS


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_left_padded_batch_generates_what_its_rows_do_alone(fields, attention, cache):
    model = build(attention, **fields)
    batch, mask = left_padded(prompts())
    kind = {"cache_implementation": "static"} if cache == "static" else {"tokenizer": object()}  # for stop strings
    together = model.generate(batch, attention_mask=mask, max_new_tokens=8, **GREEDY, **kind)
    alone = [greedy_without_cache(model, prompt[None], 8)[0, -8:] for prompt in prompts()]
    assert torch.equal(together[:, -8:], torch.stack(alone))


@pytest.mark.full  # a thread and its cache
@pytest.mark.skipif(
    not hasattr(ContinuousBatchingConfig, "page_size"), reason="pages are not sized in this transformers"
)
def test_continuous_batching_generates_what_its_prompts_do_alone(fields):
    """All requests in pages of one cache and, 16 tokens at a time, in one row: prompts come in parts."""
    model = build(**fields)
    pages = ContinuousBatchingConfig(page_size=16, num_blocks=16, max_batch_tokens=16)
    settings = GenerationConfig(max_new_tokens=8, eos_token_id=-1, **GREEDY)
    answers = model.generate_batch([prompt.tolist() for prompt in prompts()], settings, pages)
    alone = [greedy_without_cache(model, prompt[None], 8)[0, -8:].tolist() for prompt in prompts()]
    assert [answer.generated_tokens for answer in answers.values()] == alone


@pytest.mark.parametrize("drafts", ["assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens"])
def test_assisted_generation_is_greedy_generation(drafts):
    model, ids = build(), some_ids(1)
    given = build(num_hidden_layers=1) if drafts == "assistant_model" else 1 + (drafts != "assistant_early_exit")
    assisted = model.generate(ids, max_new_tokens=8, **GREEDY, **{drafts: given})
    assert torch.equal(assisted, model.generate(ids, max_new_tokens=8, **GREEDY))
    assert model.config.num_hidden_layers == 3


@pytest.mark.full
@pytest.mark.parametrize("placement", ["qkv", "qk_and_v"])
@torch.no_grad()
def test_the_forward_compiles_without_graph_breaks(placement):
    """`fullgraph` refuses a break. The backend `eager` runs the traced graph: what counts is that it can be traced."""
    model, ids = build(num_hidden_layers=1, **PLACEMENTS[placement]), some_ids()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert (compiled(ids, use_cache=False).logits - model(ids).logits).abs().max() < FLOAT32_LOGITS
    assert (compiled(ids).logits - model(ids).logits).abs().max() < FLOAT32_LOGITS
    cache = StaticCache(config=model.config, max_cache_len=16)
    steps = [compiled(part, **{CACHE_NAME: cache}).logits for part in (ids[:, :7], ids[:, 7:8], ids[:, 8:9])]
    assert (torch.cat(steps, dim=1) - model(ids[:, :9]).logits).abs().max() < FLOAT32_LOGITS
