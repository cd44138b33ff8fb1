"""The model as servers run it: under an attention of their own, by their tensor parallel plan, over HTTP."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megatron_fanformer.hf import FANformerConfig
from tests.generate.making import write_export, write_tokenizer
from tests.hf.models import LENGTHS, PLACEMENTS, SIZES, build, prompts
from tests.patience import PATIENCE_SECONDS
from tests.small_runs import ROOT, start_program

FLOAT32_HIDDEN = 1e-5  # hidden states of order 1, summed in another order
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
    object knows, which comes through the model's arguments; no mask; out come [s, n d]."""
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


def test_servers_split_attention_and_swiglu_and_keep_fan_whole() -> None:
    """They read the plan's names as regular expressions, and know the two styles alone (not `colwise_gather_output`,
    which is why placement `qk_and_v` is not for several of their ranks)."""
    model = build().model
    plan = model.config.base_model_tp_plan
    plan.pop("embed_tokens", None)  # which transformers 5.20 adds
    styles = {re.compile(pattern): style for pattern, style in plan.items()}
    assert set(styles.values()) == {"colwise", "rowwise"}
    split = {
        name.rpartition(".")[2]: style
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        for pattern, style in styles.items()
        if pattern.match(name)
    }
    columns = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "colwise")
    assert split == columns | {"o_proj": "rowwise", "down_proj": "rowwise"}
    in_ffn = build(fan_placement="ffn").config.base_model_tp_plan
    in_ffn.pop("embed_tokens", None)
    assert in_ffn == {name: style for name, style in plan.items() if ".mlp." not in name}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def asked(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
        return json.load(answer)


def wait_for(server: "subprocess.Popen[str]", url: str) -> None:
    for _ in range(PATIENCE_SECONDS):
        assert server.poll() is None, server.communicate()[1]
        try:
            asked(url)
            return
        except urllib.error.URLError:
            time.sleep(1)
    raise AssertionError(f"no answer in {PATIENCE_SECONDS} s")


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
        wait_for(server, f"{url}/health")
        text = {"model": str(folder), "prompt": "def f(x):", "max_tokens": 8}
        assert asked(f"{url}/v1/completions", text)["choices"][0]["text"] == greedy("def f(x):")
        chat = {"model": str(folder), "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        answer = asked(f"{url}/v1/chat/completions", {**chat, "stream": False})
        assert answer["choices"][0]["message"]["content"] == greedy("hello|")
    finally:
        server.terminate()
        server.communicate(timeout=PATIENCE_SECONDS)
