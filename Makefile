# RLBoost: `make help` lists the targets. Everything is installed into $(VENV), once per change of pyproject.toml.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

PYTHON ?= python3
VENV ?= .venv
ROUNDS ?= 5
BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/.*"torch==\([0-9.]*\)".*/\1/p' pyproject.toml)
TORCH_STAMP := $(VENV)/.torch-$(TORCH)
TRAIN := $(VENV)/.installed-train
DEV := $(VENV)/.installed-dev

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

# --- install ----------------------------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(TORCH_STAMP): | $(BIN)/python
	@echo "installing torch $(TORCH) (once; the largest download)"
	@$(BIN)/python -m pip install -qq "torch==$(TORCH)"
	@touch $@

$(TRAIN): pyproject.toml $(TORCH_STAMP)
	@echo "installing RLBoost with [train]"
	@$(BIN)/python -m pip install -qq --editable ".[train]"
	@touch $@

$(DEV): pyproject.toml $(TORCH_STAMP)
	@echo "installing RLBoost with [dev]"
	@$(BIN)/python -m pip install -qq --editable ".[dev]"
	@touch $(TRAIN) $@

.PHONY: install
install: $(DEV) ## install everything that development needs

# --- use --------------------------------------------------------------------------------------------------

.PHONY: quickstart
quickstart: $(TRAIN) ## install and run examples/quickstart.yaml: learning goes on while machines are killed
	$(BIN)/rlboost launch examples/quickstart.yaml --yes

# --- check ------------------------------------------------------------------------------------------------

.PHONY: test
test: $(DEV) ## unit, property and integration tests
	$(BIN)/python -m pytest -q -n 2 -m "not e2e" tests

.PHONY: e2e
e2e: $(DEV) ## the CLI from launch to down, with real kills
	$(BIN)/python -m pytest -q -m e2e tests/e2e

.PHONY: lint
lint: $(DEV) ## format, lint rules and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.PHONY: format
format: $(DEV) ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: docs
docs: $(DEV) ## write the generated pages of docs/
	$(BIN)/python docs/generate.py

.PHONY: docs-check
docs-check: $(DEV) ## fail if a generated page is out of date
	$(BIN)/python docs/generate.py --check

.PHONY: build
build: $(DEV) ## wheel and source archive in dist/
	$(BIN)/python -m build --no-isolation

.PHONY: ci
ci: ## everything that a change has to pass
	@$(MAKE) lint
	@$(MAKE) docs-check
	@$(MAKE) test
	@$(MAKE) e2e

.PHONY: soak
soak: $(DEV) ## property, integration and e2e tests $(ROUNDS) times over, each with new random seeds
	for round in $$(seq $(ROUNDS)); do \
		echo "round $$round of $(ROUNDS)"; \
		$(BIN)/python -m pytest -q -m "property or integration or e2e" tests; \
	done

# --- measure ----------------------------------------------------------------------------------------------

.PHONY: bench
bench: bench-ingest ## all benchmarks

.PHONY: bench-ingest
bench-ingest: $(DEV) ## token ingest: tokens/s and CPU of the coordinator
	@$(BIN)/python -m benchmarks.ingest

# --- tidy -------------------------------------------------------------------------------------------------

.PHONY: clean
clean: ## remove caches and builds; $(VENV) and runs stay
	rm -rf dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find rlboost_cli runtime providers templates tests benchmarks docs -name __pycache__ -prune -exec rm -rf {} +
