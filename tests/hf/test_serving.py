"""The model as servers run it: under an attention of their own, by their tensor parallel plan, over HTTP; vLLM."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megatron_fanformer.convert.huggingface import AUTO_MAP
from megatron_fanformer.hf import FANformerConfig
from megatron_fanformer.hf.modeling_fanformer import FANformerAttention
from tests.generate.making import write_export, write_tokenizer
from tests.hf.models import LENGTHS, PLACEMENTS, PLACES, SIZES, build, prompts, some_ids
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.small_runs import ROOT, free_port, is_open, start_program

FLOAT32_HIDDEN = 1e-5  # hidden states of order 1, summed in another order
VLLM = ROOT / ".venv-vllm" / "bin" / "python"  # apart, for 0.32 needs an older transformers than ours
ASKED = [row[: 2 + place % 10].tolist() for place, row in enumerate(some_ids(20))]
ASK_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
*folders, split, ranks, prompts = sys.argv[1:]
kind = dict(model_impl="transformers", trust_remote_code=True, skip_tokenizer_init=True)
kind |= {f"{split}_parallel_size": int(ranks), "enforce_eager": split == "tensor"}
greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=0, detokenize=False)
asked = [{"prompt_token_ids": ids} for ids in json.loads(prompts)]
for folder in folders:
    for dtype in ("float32", "bfloat16"):
        model = LLM(folder, dtype=dtype, gpu_memory_utilization=0.1, **kind)
        found = [answer.outputs[0] for answer in model.generate(asked, greedy)]
        rows = [[one.token_ids, [step[i].logprob for i, step in zip(one.token_ids, one.logprobs)]] for one in found]
        print("ANSWERS", json.dumps([folder, dtype, rows]), flush=True)
        del model
        cleanup_dist_env_and_memory()
"""
TEMPLATE = "{% for message in messages %}{{ message.content }}|{% endfor %}"


def attention_of_requests(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    *,
    attention_instances: dict[int, Any],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As vLLM and SGLang put theirs there: one row [1, n, s, d] for all requests, told apart by what a layer's own
    object knows, which comes through the model's arguments (vLLM 0.32's is the layer's `attn`); out come [s, n d]."""
    assert attention_mask is None
    lengths = attention_instances[module.layer_idx].lengths
    requests = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    kind = {"is_causal": True, "scale": scaling, "enable_gqa": True}
    out = torch.cat([F.scaled_dot_product_attention(*request, **kind) for request in requests], dim=2)
    return out.transpose(1, 2).flatten(2)[0], None


@pytest.mark.parametrize("placement", [*PLACEMENTS, "ffn"])
@torch.no_grad()
def test_requests_in_one_row_are_each_computed_alone(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "of_requests", attention_of_requests)
    fields = PLACEMENTS.get(placement, {"fan_placement": "ffn"})
    alone = build(**fields).model
    config = FANformerConfig(**SIZES | fields)
    config._attn_implementation = "of_requests"
    served = AutoModel.from_config(config).eval()
    served.load_state_dict(alone.state_dict())
    attention = served.layers[1].self_attn
    assert type(attention).forward is FANformerAttention.forward  # in whose source vLLM looks for the call of attention
    requests = prompts()

    def hidden(heads: int) -> torch.Tensor:
        layer = SimpleNamespace(lengths=LENGTHS, num_heads=heads)
        (hidden, *_) = served(
            input_ids=torch.cat(requests)[None],
            position_ids=torch.cat([torch.arange(length) for length in LENGTHS])[None],
            use_cache=False,
            attention_instances=dict.fromkeys(range(config.num_hidden_layers), layer),
            return_dict=False,
        )
        return hidden[0]

    for request, found in zip(requests, hidden(config.num_attention_heads).split(LENGTHS), strict=True):
        assert (found - alone(request[None]).last_hidden_state[0]).abs().max() < FLOAT32_HIDDEN
    if config.fan_placement == "qk_and_v":  # and the other placements' own maps are split
        with pytest.raises(ValueError, match="serve it with --tensor-parallel-size 1"):
            hidden(config.num_attention_heads // 2)
        attention.attn = SimpleNamespace(num_heads=config.num_attention_heads // 2)
        with pytest.raises(ValueError, match="serve it with --tensor-parallel-size 1"):
            hidden(config.num_attention_heads)


@pytest.mark.parametrize(("placement", "whole"), [("qkv", ()), ("ffn", ("gate_proj", "up_proj", "down_proj"))])
def test_servers_split_attention_and_swiglu_and_keep_fan_whole(placement: str, whole: tuple[str, ...]) -> None:
    """They read the plan's names as regular expressions."""
    model = build(fan_placement=placement).model
    plan, names = model.config.base_model_tp_plan, [name for name, _ in model.named_modules()]
    found = {name: {style for pattern, style in plan.items() if re.match(pattern, name)} for name in names}
    split = {name.rpartition(".")[2]: style for name, styles in found.items() for style in styles}
    split.pop("embed_tokens", None)  # which transformers 5.20 adds
    columns = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "colwise")
    rows = dict.fromkeys(("o_proj", "down_proj"), "rowwise")
    assert split == {name: style for name, style in (columns | rows).items() if name not in whole}
    assert [pattern for pattern in plan if not any(re.match(pattern, name) for name in names)] == []


def asked(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
        return json.load(answer)


@pytest.mark.full  # a process that imports for half a minute
@torch.no_grad()
def test_the_example_serves_an_export(tmp_path: Path) -> None:
    for package in ("fastapi", "uvicorn", "openai", "accelerate"):
        pytest.importorskip(package)
    folder = tmp_path / "export"
    write_export(folder, "fanformer-tied", write_tokenizer(tmp_path), TEMPLATE)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

    def greedy(text: str) -> str:
        inputs = tokenizer(text, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs.input_ids.shape[1] :]
        return tokenizer.decode(ids, skip_special_tokens=True)

    port = free_port()
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": ""}
    words = [sys.executable, str(ROOT / "examples" / "serve.py"), str(folder), "--device", "cpu", "--port", str(port)]
    server = start_program(*words, environment=offline)
    try:
        url = f"http://localhost:{port}"
        wait_until(lambda: is_open(port), server)
        text = {"model": str(folder), "prompt": "def f(x):", "max_tokens": 8}
        assert asked(f"{url}/v1/completions", text)["choices"][0]["text"] == greedy("def f(x):")
        chat = {"model": str(folder), "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stream": False}
        assert asked(f"{url}/v1/chat/completions", chat)["choices"][0]["message"]["content"] == greedy("hi|")
    finally:
        server.terminate()
        server.communicate(timeout=PATIENCE_SECONDS)


def log_probabilities(folder: str, dtype: str, rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the ids that vLLM chose, and of the likeliest, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    texts = [(len(prompt), prompt + ids) for prompt, (ids, _) in zip(ASKED, rows, strict=True)]
    logits = torch.cat([model(torch.tensor([ids])).logits[0, start - 1 : -1] for start, ids in texts])
    found = logits.float().log_softmax(-1)
    return found.gather(1, torch.tensor([ids for ids, _ in rows]).view(-1, 1))[:, 0], found.max(-1).values


@pytest.mark.full
@pytest.mark.timeout(3600)  # ten starts, which other test processes slow down from four minutes to twelve
@pytest.mark.skipif(not VLLM.is_file(), reason=".venv-vllm has no vLLM (docs/other-tools.md)")
@torch.no_grad()
def test_vllm_chooses_the_likeliest_ids_and_has_their_log_probabilities(tmp_path: Path) -> None:
    """In bf16 they are as near to float32's as transformers' are. Two ranks refuse values that cannot be split."""
    folders = [tmp_path / f"{place}-{tied}" for place in PLACES for tied in ("tied", "untied")]
    for folder in folders:
        place, _, tied = folder.name.partition("-")
        # Heads of 32, the narrowest there. Weights drawn wider make phases so large that bf16 rounds them away.
        model = build(alpha=0.06, hidden_size=128, fan_placement=place, tie_word_embeddings=tied == "tied")
        model.config.auto_map = AUTO_MAP
        model.save_pretrained(folder)
    own = {"HF_HOME": str(tmp_path), "VLLM_CACHE_ROOT": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    own |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    splits = ((folders, "tensor", 1), (folders[:3], "tensor", 2), (folders[3:], "pipeline", 2))
    for (served, split, ranks), count in zip(splits, (8, 4, 2), strict=True):
        words = [VLLM, "-c", ASK_VLLM, *served, split, str(ranks), json.dumps(ASKED)]
        done = subprocess.run(words, env=os.environ | own, capture_output=True, text=True, check=False)
        assert ("serve it with --tensor-parallel-size 1" in done.stdout + done.stderr) is (count == 4), done.stderr
        answers = [json.loads(line[8:]) for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
        assert len(answers) == count
        for folder, dtype, rows in answers:
            exact, likeliest = log_probabilities(folder, "float32", rows)
            rounding = log_probabilities(folder, dtype, rows)[0] - exact
            found = torch.tensor([found for _, found in rows]).flatten()
            assert (found - exact).norm() <= 1.5 * rounding.norm() + 5e-5, (split, ranks, folder, dtype)
            assert (likeliest - exact).max() <= 2 * rounding.abs().max(), (split, ranks, folder, dtype)
