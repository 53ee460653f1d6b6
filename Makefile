# Everything a fresh machine needs is Python 3.11 or 3.12, gcc and make. `make help` lists the targets.
#
#   PYTHON       which Python to use (default: python3.11, else python3.12); each version has its own environment
#   ARGS         overrides for `make train`, for instance ARGS="trainer.seed=1 rollout.tp=2"
#   TESTS        what `make test` runs (default: all), for instance TESTS=tests/algos
#   TORCH_INDEX  a package index with the CPU build of torch, where pip's own configuration has none

SHELL := /bin/bash
PYTHON ?=
ARGS ?=
TESTS ?=
export TORCH_INDEX

# Expanded only by the recipes that use it.
BIN = $(shell locks/install.sh where $(PYTHON))/bin
PACKAGES = megagent tests benchmarks checkpoint_tools

.DEFAULT_GOAL := help
.PHONY: help setup train test lint format clean distclean

help: ## list the targets
	@echo "usage: make TARGET [PYTHON=python3.12] [ARGS='key=value ...'] [TESTS='tests/...']"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make the environment from the lock file (the targets below do it by themselves)
	@locks/install.sh setup $(PYTHON)

train: setup ## teach the tiny model to shop: megagent train experiment=webshop_tiny $(ARGS)
	@$(BIN)/megagent train experiment=webshop_tiny $(ARGS)

test: setup ## run the tests, quick ones first
	@$(BIN)/python -m pytest $(TESTS)

lint: setup ## check format, rules and types
	@$(BIN)/ruff format --check $(PACKAGES)
	@$(BIN)/ruff check $(PACKAGES)
	@$(BIN)/mypy

format: setup ## format the code and apply safe fixes
	@$(BIN)/ruff check --fix --quiet $(PACKAGES) || true
	@$(BIN)/ruff format $(PACKAGES)

clean: ## remove caches and build results; runs/ and the environments stay
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find megagent tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## also remove the environments
	@rm -rf .venv .venv-3.12
