"""The layer spec in somebody else's Megatron-LM: its import brings nothing along, and says nothing."""

import json
import subprocess
import sys

from tests.small_runs import ROOT

# What Megatron-LM has imported before it looks for --spec; then ours, and what came with it.
IMPORTS = """
import json, sys, warnings
from megatron_fanformer.runtime import megatron_cpu
megatron_cpu.install()
import megatron.core.models.gpt.gpt_layer_specs
for name in [name for name in sys.modules if name.split(".")[0] == "megatron_fanformer"]:
    del sys.modules[name]
before = set(sys.modules)
warnings.simplefilter("always")
print("before", flush=True)
print("before", file=sys.stderr, flush=True)
from megatron_fanformer.model.layer_spec import fanformer_layer_spec
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_it_imports_torch_and_megatron_core_alone_and_prints_nothing() -> None:
    """`pip install --no-deps` is enough for it, and it is there as soon as megatron-core is."""
    imported = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, cwd=ROOT)
    modules = json.loads(imported.stdout.splitlines()[-1])
    assert {name.split(".")[0] for name in modules} <= {"megatron", "megatron_fanformer"}
    assert "megatron_fanformer.configuration" not in modules
    assert imported.stderr.partition("before\n")[2] == ""
    assert imported.stdout.partition("before\n")[2].count("\n") == 1
