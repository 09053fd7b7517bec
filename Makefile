# Two commands do all: `make demo` and `make test`. Each sets up .venv once.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON := $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help demo test test-full chaos lint bench clean

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "hybrid needs Python 3.11 or newer with venv (Debian: apt install python3-venv)"; exit 1; }
	@echo "setting up .venv with $(PYTHON) (a minute or two, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP) ## Everything on this machine: train, specialise, serve, ask, lose a host
	@$(BIN)/hybrid demo $(ARGS)

test: $(STAMP) ## The tests
	$(BIN)/pytest -q -m "not full" $(ARGS)

test-full: $(STAMP) ## The tests and the long proofs
	$(BIN)/pytest -q $(ARGS)

chaos: $(STAMP) ## Kill everything under load, for SEEDS=N seeds (default 20)
	HYBRID_CHAOS_SEEDS=$$(seq -s, 1 $(or $(SEEDS),20)) $(BIN)/pytest -q -s tests/chaos $(ARGS)

lint: $(STAMP) ## Format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP) ## Each claim against its peer, quickly
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script --quick --json - || exit 1; done

clean: ## Remove what was built, trained and cached (not .venv)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis examples/*/.hybrid
