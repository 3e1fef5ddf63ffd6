# `make serve` and `make test` do all the set-up themselves, once, and again when what is installed has changed.
#
#   PYTHON  the interpreter that the virtual environment is made from (3.11 or newer)
#   TORCH   what to ask pip for; put pip's own options after it for a build from another place
#   ARGS    what is passed on to `cospec serve`, pytest or the benchmarks

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=

# The tests start hundreds of Python processes, which would all compile the package again without bytecode files.
test test-exactness-python test-cluster: export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INSTALLED_FROM := pyproject.toml $(wildcard hatch_build.py csrc/*.cpp csrc/*/*)
CPP = $(shell find csrc tests -name '*.cpp' -o -name '*.h')

.PHONY: help setup serve test test-exactness-python test-cluster lint format bench clean
.DEFAULT_GOAL := help

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1  /p' $(MAKEFILE_LIST) | awk '{ name = $$1; $$1 = ""; printf "  make %-22s%s\n", name, $$0 }'

# torch goes first and pinned: a looser requirement would be met by the newest build, with gigabytes of GPU libraries.
$(READY): $(INSTALLED_FROM)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "cospec needs Python 3.11 or newer; name one with make PYTHON=/path/to/python3"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "python3 cannot make virtual environments; install the package python3-venv"; exit 1; }
	@echo "Setting up $(VENV), once: torch and the libraries around it take some minutes and 1.5 GB."
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

setup: $(READY) ## create .venv and install the package with its development tools

serve: $(READY) ## serve the model that comes with the package on http://127.0.0.1:8000
	$(BIN)/cospec serve $(ARGS)

test: lint ## check style, types and imports, then run every test that needs no cluster
	$(BIN)/python -m pytest -n 3 --dist worksteal --max-worker-restart 4 -m "not ray and not cluster" $(ARGS)

test-exactness-python: $(READY) ## run the exactness tests without the native library
	$(BIN)/python -m pytest -n 3 --dist worksteal --native off tests/exactness $(ARGS)

test-cluster: $(READY) ## run the tests that start a cluster of processes
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "ray or cluster" tests/cluster tests/contract $(ARGS)

lint: $(READY) ## check style, types and imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(READY) ## put the code into its one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

bench: $(READY) ## measure speed on this machine and write the benchmark reports
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	$(BIN)/python -m benchmarks --run $(ARGS)

clean: ## remove the virtual environment and everything that was built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f src/cospec/_native*.so
