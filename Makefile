# Hotrow's commands. `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-long test-numpy1 lint format bench bench-quick clean

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A Criteo file for `make demo`; empty: generated data.
DATA ?=
# Index of CPU-only PyTorch wheels, if you do not want the CUDA build; see the README.
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# What runs without PyTorch, RocksDB and the web framework.
NUMPY1_TESTS := tests/kernels $(addprefix tests/serving/,dense model test_batch.py test_config_inference.py test_config_model_directory.py)
BUILD_INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(wildcard kernels/host/*)

help: ## list the commands
	@grep -hE '^[a-z][a-z0-9-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

demo: $(VENV)/.demo ## train, export, serve and ask a model; DATA=file.csv takes a Criteo file
	@$(BIN)/python examples/demo.py $(if $(DATA),--data "$(DATA)")

test: $(VENV)/.test ## everything a machine without a GPU can run, but the tests that take minutes
	@$(BIN)/python -m pytest -m "not long"

test-fast: $(VENV)/.test ## the tests without the slow ones
	@$(BIN)/python -m pytest -m "not slow and not long"

test-long: $(VENV)/.test ## the tests that take minutes each; the outcome goes to benchmarks/results/
	@$(BIN)/python -m benchmarks.long_tests --json benchmarks/results/test_long.json

test-numpy1: $(VENV)-numpy1/.done ## the serving tests under NumPy 1.26, without the heavy extras
	@$(VENV)-numpy1/bin/python -m pytest -q -m "not slow and not long" $(NUMPY1_TESTS)

lint: $(VENV)/.lint ## ruff, mypy strict, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(VENV)/.lint ## let ruff rewrite the sources
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/.test ## all CPU benchmarks; results go to benchmarks/results/
	@for name in host_table snapshot rocksdb_misses rocksdb_load redis_store tiers eviction scale predict http_server; do \
	  $(BIN)/python -m benchmarks.$$name --json benchmarks/results/$$name.json; done

bench-quick: $(VENV)/.test ## the same on small inputs, nothing written
	@for name in host_table snapshot rocksdb_misses rocksdb_load redis_store tiers eviction scale predict http_server; do $(BIN)/python -m benchmarks.$$name --quick; done

clean: ## remove the environments and everything built
	rm -rf $(VENV) $(VENV)-numpy1 build demo_output .mypy_cache .ruff_cache .pytest_cache .hypothesis

# One clear line for what a fresh machine may lack.
.PHONY: tools
tools:
	@command -v $(PYTHON) >/dev/null || { echo "Hotrow needs Python 3.11 or newer: '$(PYTHON)' was not found (make PYTHON=/path/to/python3.11 ...)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Hotrow needs Python 3.11 or newer: '$(PYTHON)' is $$($(PYTHON) -V 2>&1) (make PYTHON=/path/to/python3.11 ...)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Hotrow needs Python's venv module: apt-get install python3-venv"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || { echo "Hotrow needs Python's headers: apt-get install python3-dev"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { echo "Hotrow needs a C++17 compiler: apt-get install g++"; exit 1; }

$(BIN)/python: | tools
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip

# The build tools are installed first, so that the extension builds in this environment and rebuilds take seconds.
$(VENV)/.build: $(BUILD_INPUTS) | $(BIN)/python
	@echo "installing the build tools"
	@$(PIP) scikit-build-core nanobind cmake ninja
	@touch $@

$(VENV)/.demo: $(VENV)/.build
	@echo "building Hotrow and installing what it needs (PyTorch is the large part)"
	@$(PIP) --no-build-isolation -e '.[train,rocksdb,client]'
	@touch $@

$(VENV)/.test: $(VENV)/.build
	@echo "building Hotrow and installing what its tests need (PyTorch is the large part)"
	@$(PIP) --no-build-isolation -e '.[test]'
	@touch $@ $(VENV)/.demo

$(VENV)/.lint: $(VENV)/.build
	@echo "installing the linters"
	@$(PIP) ruff mypy import-linter pre-commit
	@$(PIP) --no-build-isolation -e '.[test]'
	@touch $@

$(VENV)-numpy1/.done: $(BUILD_INPUTS) | tools
	@$(PYTHON) -m venv $(VENV)-numpy1
	@grep -v '^numpy==' constraints.txt > $(VENV)-numpy1/constraints.txt
	@$(VENV)-numpy1/bin/python -m pip install -q -c $(VENV)-numpy1/constraints.txt 'numpy==1.26.4' pydantic array-api-compat orjson pytest pytest-timeout hypothesis scikit-build-core nanobind cmake ninja
	@$(VENV)-numpy1/bin/python -m pip install -q --no-build-isolation --no-deps -e .
	@touch $@
