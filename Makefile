# Everything a checkout needs; `make help` lists it. PYTHON names the interpreter that .venv is made from.

# By default Python 3.12, which gets the newer megatron-core, where there is one.
ifeq ($(origin PYTHON), undefined)
PYTHON := $(shell python3.12 -c '' 2>/dev/null && echo python3.12 || echo python3)
endif
VENV := .venv
BIN := $(VENV)/bin

# Test processes side by side, each with ranks of its own: one a core, and four at most, which take 2 GB each. A module
# stays in one process, so that what its tests share is made once. Bytecode is kept whatever the environment says, or each
# of some hundred processes would compile the package again.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, len(os.sched_getaffinity(0))))' 2>/dev/null)
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses=$(or $(WORKERS),1) --dist=loadscope --no-loadscope-reorder

# The constraints file of this interpreter: py310, py311, or py312 for 3.12 and later; `old` below 3.10.
SERIES := $(shell $(PYTHON) -c 'import sys; v = sys.version_info; \
	print("py3%d" % min(v[1], 12) if v >= (3, 10) else "old")' 2>/dev/null)
CONSTRAINTS := constraints/$(SERIES).txt
PINS := --constraint $(CONSTRAINTS)
# Transformer Engine's Python, for tests without a GPU.
ENGINE := constraints/engine.txt
# The data of `evaluate`'s tasks.
EVAL := constraints/eval.txt
INSTALLED := $(VENV)/.installed-$(SERIES)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-full faults smoke newest newest-exports lint check format docs release clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

install: $(INSTALLED) ## make .venv and install the package and the tested set into it

demo: $(INSTALLED) ## text to tokens to a trained FANformer to generated text, on this machine
	$(BIN)/megatron-fanformer demo

test: $(INSTALLED) ## run the tests
	$(PYTEST)

test-full: $(INSTALLED) ## run the tests, those that take longer too
	$(PYTEST) -m ""

faults: $(INSTALLED) ## plant each fault of tests/faults/planted/ in a copy, and see which test notices it
	$(BIN)/python -m tests.faults.planted $(ROOMS)

smoke: $(INSTALLED) ## the part of the tests that shows whether another Python and megatron-core serve
	$(PYTEST) tests/test_megatron_seam.py tests/parity/test_parity.py tests/train/test_trainer.py tests/golden \
		tests/engine/test_layers.py tests/engine/test_stock_loop.py tests/engine/test_hybrid_stack.py \
		tests/model/test_stages.py tests/checkpoint/test_megatron_versions.py

newest: ## smoke, tests/hf and the demo with the newest of everything that resolves, in .venv-newest (PYTHON=python3.12 or later)
	rm -rf .venv-newest runs/newest
	$(MAKE) VENV=.venv-newest PINS= install
	.venv-newest/bin/python -m pip install --quiet --upgrade transformers
	$(MAKE) VENV=.venv-newest PINS= smoke
	$(MAKE) VENV=.venv-newest PINS= WORKERS=1 newest-exports
	.venv-newest/bin/megatron-fanformer demo --output runs/newest

newest-exports: $(INSTALLED)
	$(PYTEST) tests/hf tests/convert/test_huggingface.py -m ""

lint: $(INSTALLED) ## check format, lint, types and sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/size.py --check

check: lint test ## lint, then test

format: $(INSTALLED) ## rewrite the sources to the format, and fix what lint can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED) $(VENV)-docs/.installed ## build the documentation's site into build/site
	$(BIN)/python tools/page_tables.py build/page_tables.json
	$(VENV)-docs/bin/mkdocs build --strict

# Each file is installed with the newest of everything, which is printed, and tried where no checkout is at hand.
release: $(INSTALLED) ## the sdist and the wheel in dist/; the demo and tests/hf by each, in an empty environment
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	set -e; for file in $(CURDIR)/dist/*; do \
		rm -rf build/release; $(PYTHON) -m venv build/release/env; cp -r pyproject.toml tests build/release; cd build/release; \
		env/bin/python -m pip install --quiet "$$file[fast]" pytest pytest-timeout; \
		env/bin/python -m pip freeze; \
		env/bin/megatron-fanformer demo; env/bin/python -m pytest -m "" tests/hf; cd $(CURDIR); \
	done

clean: ## remove .venv, builds and caches; runs/ stays
	rm -rf $(VENV) $(VENV)-docs .venv-3.1[0-9] .venv-newest .venv-vllm build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)-docs/.installed: constraints/docs.txt
	test -e $@ || $(PYTHON) -m venv --clear $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --requirement $<
	touch $@

# The stamp carries the interpreter's series, so that another PYTHON rebuilds the environment; a changed
# requirement only updates it.
ifneq ($(filter py3%,$(SERIES)),)
$(INSTALLED): pyproject.toml setup.py $(CONSTRAINTS) $(ENGINE) $(EVAL)
	@echo "Installing into $(VENV) from $(CONSTRAINTS); the first time takes minutes."
	test -e $@ || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev,fast]' $(PINS)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/engine --requirement $(ENGINE)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/eval --requirement $(EVAL)
	touch $@
else
.PHONY: $(INSTALLED)
$(INSTALLED):
	@echo "$(PYTHON) is not Python 3.10 or later ($$($(PYTHON) -V 2>&1 | head -n 1));" \
		"name one, such as make PYTHON=python3.11" >&2
	@exit 1
endif
