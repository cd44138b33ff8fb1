"""Serves an exported model over HTTP with `transformers serve`: completions and chats as OpenAI's API has them.

    pip install 'transformers[serving]'
    python examples/serve.py runs/demo-hf --device cpu
    curl localhost:8000/v1/completions --json '{"model": "runs/demo-hf", "prompt": "def main(", "max_tokens": 40}'

Arguments after the export are passed to `transformers serve`. The command alone does not find the model: it looks for
the class by its name in transformers itself, where a model that brings its own code never is.
"""

import sys

import transformers
from transformers.cli.transformers import main
from transformers.dynamic_module_utils import get_class_from_dynamic_module

if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
    sys.exit(f"name an exported folder: python {sys.argv[0]} FOLDER [options of transformers serve]")
model = get_class_from_dynamic_module("modeling_fanformer.FANformerForCausalLM", sys.argv[1])
setattr(transformers, model.__name__, model)
sys.argv = ["transformers", "serve", *sys.argv[1:], "--trust-remote-code"]
main()
