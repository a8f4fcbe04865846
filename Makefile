# Hotrow's commands. `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo demo-updates wheel loadtest test test-fast test-long test-numpy1 test-exports test-tensorflow test-triton test-host-sanitizers check-nvrtc test-kernels test-kernels-tsan test-kernels-asan test-gpu bench-gpu mutants lint format bench bench-quick bench-tensorflow clean

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Container images often set this. Without bytecode, every process that a test starts compiles Hotrow again.
unexport PYTHONDONTWRITEBYTECODE
# A Criteo file for `make demo`; if empty, it generates data.
DATA ?=
# What `make loadtest` serves, its scenario, and more options.
REPO ?= demo_output/models
SCENARIO ?= steady
ARGS ?=
# An index of CPU-only PyTorch wheels, if you do not want the CUDA build; see the README.
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# The tests that run without PyTorch, RocksDB and the web framework.
NUMPY1_TESTS := tests/kernels $(addprefix tests/serving/,dense model test_batch.py config/test_inference.py config/test_model_directory.py)
# The tests of the kernels and of the GPU cache, and of code that uses them. `make test` leaves them to `make test-kernels`,
# which runs all of them in random orders of threads and with late streams: if the code forgets to wait for a late stream,
# they fail. `make test-kernels-asan` and `-tsan` run the kernels in the fixed order, and look for races.
KERNEL_TESTS := $(wildcard tests/kernels/cuda tests/gpu_cache)
DEVICE_TESTS := $(KERNEL_TESTS) $(wildcard $(addprefix tests/serving/,lookup dense/test_device_network.py))
NOT_DEVICES := $(addprefix --ignore=,$(DEVICE_TESTS))
RACE_TESTS := $(wildcard $(addprefix tests/,$(addprefix kernels/cuda/,test_query.py test_writes.py test_team.py) \
  $(addprefix gpu_cache/,test_readers_with_writers.py test_workspace.py test_pooled_lookup.py test_key_lookup.py \
  test_insertion.py test_absent_keys.py)))
ON_RUNNER := not gpu and not long
# Threads meet at the same places with other kinds of lines and memory. `make test-long` also checks these for races.
RACE_MARKS ?= not slow and not kernels
# Tests wait for servers half of the time, so two cores have work for four processes. Each process starts its own Redis
# servers, so more would not help.
OVER_CORES := -n 4 --dist worksteal
# Tests of kernels and of NumPy do not wait.
ON_CORES := -n $(shell nproc | awk '{print ($$1 < 4 ? $$1 : 4)}') --dist worksteal
# A file whose fixture compiles for a minute stays in one process.
BY_FILE := -n 2 --dist loadfile
# Late streams sleep most of the time, so more workers than cores pay.
OVER_LATENESS := -n 8 --dist worksteal
# The GPU commands create an environment with CuPy for CUDA 12 or 13, or use an existing Python: GPU_PYTHON=python3
# installs nothing, and leaves out the tests that need more than NumPy, CuPy and pytest.
CUDA ?= cuda13
GPU_PYTHON ?= $(BIN)/python
GPU_READY := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.gpu)
GPU_TESTS ?= $(if $(GPU_READY),tests,tests/kernels tests/gpu_cache tests/test_gpu_benchmark.py)
BENCHMARKS := host_table host_time snapshot swaps rocksdb_misses rocksdb_load redis_store tiers updates update_stream features candidates eviction cache_policy scale predict offline batching pooling training training_processes training_data fused_lookup sok persia
DRAWN_FAULTS ?= 60
SEEDS ?= 1 2 3
# The architectures, from sm_75 to sm_120, for which `make check-nvrtc` compiles; if empty, all.
ARCHITECTURES ?=
# The Python of an environment with Triton, which the benchmark of servers compares with: .venv-numpy1/bin/python, after
# `make test-triton`.
TRITON ?=
# An environment on top of the first, with what benchmarks compare with.
PEERS := $(VENV)-peers
BUILD_INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(wildcard kernels/host/*/*)

help: ## list the commands
	@grep -hE '^[a-z][a-z0-9-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 26

demo: $(VENV)/.demo ## train, export, serve and query a model; DATA=file.csv takes a Criteo file
	@$(BIN)/python examples/demo.py $(if $(DATA),--data "$(DATA)")

demo-updates: $(VENV)/.demo ## serve a model while it learns, and print its AUC with and without updates
	@$(BIN)/python examples/demo_updates.py

loadtest: $(VENV)/.test ## send load to a server of `make demo`'s model; SCENARIO=spike, REPO=models, ARGS="-u 16" change it
	@$(BIN)/python -m loadtests $(REPO) --scenario $(SCENARIO) $(ARGS)

test: $(VENV)/.test ## all tests for a machine without a GPU, except those of devices, sanitizers and exports and those that take minutes
	@$(BIN)/python -m pytest $(OVER_CORES) -m "not long and not gpu and not kernels and not sanitizers and not triton and not exporter" $(NOT_DEVICES)

test-fast: $(VENV)/.test ## the tests without the slow ones
	@$(BIN)/python -m pytest $(OVER_CORES) -m "not slow and not long and not gpu and not kernels and not triton and not exporter" $(NOT_DEVICES)

test-long: $(VENV)/.test ## the tests that take minutes each; results go to benchmarks/results/
	@$(BIN)/python -m tests.tools.long_tests --json benchmarks/results/test_long.json
	@$(MAKE) check-nvrtc mutants
	@$(MAKE) test-kernels-tsan RACE_MARKS="not slow"

test-numpy1: $(VENV)-numpy1/.done ## the serving tests under NumPy 1.26, without the heavy extras
	@$(VENV)-numpy1/bin/python -m pytest -q $(ON_CORES) -m "not slow and not long and not gpu and not kernels" $(NUMPY1_TESTS)

test-exports: $(VENV)/.test ## the tests that export PyTorch modules, a second each: importers and pages
	@$(BIN)/python -m pytest -q -m "exporter and not long and not gpu" tests

test-tensorflow: $(VENV)-tensorflow/.done ## the front ends for TensorFlow and Keras, without PyTorch
	@$(VENV)-tensorflow/bin/python -m pytest -q tests/tensorflow

test-triton: $(VENV)/.test $(VENV)-numpy1/.triton ## the client suite against `hotrow serve` and a real Triton, on the CPU
	@HOTROW_TRITON_PYTHON=$(VENV)-numpy1/bin/python $(BIN)/python -m pytest -q -m triton tests/e2e

test-host-sanitizers: $(VENV)/.test ## the host table's threads and snapshots under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer
	@$(BIN)/python -m pytest -q $(BY_FILE) -m "sanitizers and not long" tests/kernels

check-nvrtc: $(VENV)/.nvrtc ## compile every kernel for ARCHITECTURES, without a GPU; fails if registers or arrays spill to memory
	@$(BIN)/python -m kernels.check_nvrtc kernels/cuda/*.cu benchmarks/gpu/*.cu $(addprefix --architecture=,$(ARCHITECTURES))

test-kernels: $(VENV)/.test ## the kernels on the CPU runner: in random orders of threads, one for each of SEEDS, and with late streams (`make test-kernels-asan` has the fixed order)
	@for seed in $(SEEDS); do HOTROW_RUNNER_SEED=$$seed HOTROW_RUNNER_THREADS=2 HOTROW_RUNNER_DELAY_MS=10 \
	  $(BIN)/python -m pytest -q $(OVER_LATENESS) -m "$(ON_RUNNER)" $(DEVICE_TESTS); done

# pytest -n does not see the exit code of a process, so a race must end the process of its test at once.
test-kernels-tsan: $(VENV)/.test ## the kernels whose threads share memory, under ThreadSanitizer: a race check
	@HOTROW_RUNNER_SANITIZER=thread HOTROW_RUNNER_SEED=1 HOTROW_RUNNER_THREADS=2 TSAN_OPTIONS="halt_on_error=1 suppressions=tests/kernels/cuda/race_check.supp" \
	  LD_PRELOAD="$$(g++ -print-file-name=libtsan.so)" $(BIN)/python -m pytest -q --capture=sys $(ON_CORES) -m "$(ON_RUNNER) and $(RACE_MARKS)" $(RACE_TESTS)

test-kernels-asan: $(VENV)/.test ## all kernels in the fixed order, under AddressSanitizer and UndefinedBehaviorSanitizer
	@HOTROW_RUNNER_SANITIZER=address ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  $(BIN)/python -m pytest -q $(ON_CORES) -m "$(ON_RUNNER) and not slow" $(KERNEL_TESTS)

mutants: $(VENV)/.test ## plant faults in the kernels: the tests must notice 4 of 5 hand-picked faults, and 9 of 10 drawn faults
	@$(BIN)/python -m tests.tools.mutants --json benchmarks/results/mutants.json
	@$(BIN)/python -m tests.tools.mutants --drawn $(DRAWN_FAULTS) --json benchmarks/results/drawn_mutants.json

test-gpu: gpu $(GPU_READY) gpu-python ## the tests that need a GPU; fails without a GPU, skips only tests of real data
	@HOTROW_REQUIRE_GPU=1 $(GPU_PYTHON) -m pytest -m gpu $(GPU_TESTS)

lint: $(VENV)/.lint ## ruff, mypy strict, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(VENV)/.lint ## format and fix the sources with ruff
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(PEERS)/.done ## all CPU benchmarks and their table; TRITON=python also measures Triton; results go to benchmarks/results/
	@for name in $(BENCHMARKS); do $(PEERS)/bin/python -m benchmarks.$$name --json benchmarks/results/$$name.json; done
	@$(PEERS)/bin/python -m benchmarks.servers $(if $(TRITON),--triton $(TRITON)) --json benchmarks/results/servers.json
	@$(BIN)/python -m benchmarks.table

bench-quick: $(PEERS)/.done ## the same on small inputs, without writing results
	@for name in $(BENCHMARKS) servers; do $(PEERS)/bin/python -m benchmarks.$$name --quick; done

bench-tensorflow: $(VENV)-tensorflow/.done ## lookups in TensorFlow against TensorFlow's own; the result goes to benchmarks/results/
	@$(VENV)-tensorflow/bin/python -m benchmarks.tensorflow_lookup --json benchmarks/results/tensorflow_lookup.json

bench-gpu: gpu $(GPU_READY) ## check and then time the GPU cache on a GPU; results go to benchmarks/results/
	@$(GPU_PYTHON) -m benchmarks.gpu --json benchmarks/results/gpu_cache.json

wheel: tools ## build a wheel and an sdist in dist/, and try both in clean environments; PYTHON=python3.12 takes another Python
	@.ci/wheel $(PYTHON) -c $(CURDIR)/constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

clean: ## remove the environments and everything built
	rm -rf $(VENV) $(VENV)-numpy1 $(VENV)-tensorflow $(PEERS) build dist demo_output loadtest_report .mypy_cache .ruff_cache .pytest_cache .hypothesis

# One clear line for each thing that a fresh machine may not have.
.PHONY: tools
tools:
	@command -v $(PYTHON) >/dev/null || { echo "Hotrow needs Python 3.11 or newer: '$(PYTHON)' was not found (make PYTHON=/path/to/python3.11 ...)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Hotrow needs Python 3.11 or newer: '$(PYTHON)' is $$($(PYTHON) -V 2>&1) (make PYTHON=/path/to/python3.11 ...)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Hotrow needs Python's venv module: apt-get install python3-venv"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || { echo "Hotrow needs Python's headers: apt-get install python3-dev"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { echo "Hotrow needs a C++17 compiler: apt-get install g++"; exit 1; }

# The same checks before the GPU commands, which would otherwise fail test by test.
.PHONY: gpu gpu-python
gpu:
	@$(PYTHON) -c 'import ctypes as c, sys; n = c.c_int(); cuda = c.CDLL("libcuda.so.1"); sys.exit(bool(cuda.cuInit(0) or cuda.cuDeviceGetCount(c.byref(n)) or not n.value))' 2>/dev/null \
	  || { echo "this needs an NVIDIA GPU and its driver: libcuda.so.1 is missing or finds no GPU"; exit 1; }

gpu-python:
	@why="$$($(GPU_PYTHON) -c 'import numpy, cupy, pytest, kernels.host' 2>&1)" \
	  || { echo "'$(GPU_PYTHON)' needs NumPy, CuPy, pytest and Hotrow itself ($(GPU_PYTHON) -m pip install -e .): $${why##*$$'\n'}"; exit 1; }

$(BIN)/python: | tools
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip

# The build tools come first: the extension then builds in this environment, and rebuilds take seconds.
$(VENV)/.build: $(BUILD_INPUTS) | $(BIN)/python
	@echo "installing the build tools"
	@$(PIP) scikit-build-core hatch-fancy-pypi-readme nanobind cmake ninja
	@touch $@

$(VENV)/.demo: $(VENV)/.build
	@echo "building Hotrow and installing what it needs (PyTorch is the large part)"
	@$(PIP) --no-build-isolation -e '.[train,parquet,rocksdb,redis,client,grpc]'
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

$(VENV)/.gpu: $(VENV)/.build
	@echo "building Hotrow and installing CuPy and what the tests need (PyTorch is the large part)"
	@$(PIP) --no-build-isolation -e '.[test,$(CUDA)]'
	@touch $@

$(VENV)/.nvrtc: $(VENV)/.build
	@echo "installing CUDA's run-time compiler"
	@$(PIP) --no-build-isolation -e '.[nvrtc]'
	@touch $@

# The extension does not depend on NumPy's version: pip finds it compiled.
$(VENV)-numpy1/.done: $(VENV)/.build
	@echo "creating $(VENV)-numpy1"
	@$(PYTHON) -m venv $(VENV)-numpy1
	@grep -v '^numpy==' constraints.txt > $(VENV)-numpy1/constraints.txt
	@$(VENV)-numpy1/bin/python -m pip install -q -c $(VENV)-numpy1/constraints.txt 'numpy==1.26.4' pydantic array-api-compat orjson pytest pytest-timeout pytest-xdist hypothesis
	@$(PIP) --no-build-isolation --no-deps --upgrade --target $(VENV)-numpy1/lib/python3*/site-packages -e .
	@touch $@

# FBGEMM is built against the PyTorch of constraints.txt.
$(PEERS)/.done: | $(VENV)/.test
	@echo "installing FBGEMM and mosec, which benchmarks compare with"
	@$(PYTHON) -m venv $(PEERS)
	@$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_paths()[\"purelib\"]!r})')" > $$(echo $(PEERS)/lib/python3.*/site-packages)/hotrow.pth
	@$(PEERS)/bin/python -m pip install -q -c constraints.txt mosec==0.9.8
	@$(PEERS)/bin/python -m pip install -q --no-deps fbgemm-gpu-cpu==1.8.0
	@touch $@

$(VENV)-tensorflow/.done: $(VENV)/.build
	@echo "creating $(VENV)-tensorflow"
	@$(PYTHON) -m venv $(VENV)-tensorflow
	@grep -v '^h5py==' constraints.txt > $(VENV)-tensorflow/constraints.txt
	@$(VENV)-tensorflow/bin/python -m pip install -q --disable-pip-version-check -c $(VENV)-tensorflow/constraints.txt tensorflow-cpu tf2onnx onnx onnxruntime ndonnx spox numpy pydantic array-api-compat orjson pytest pytest-timeout hypothesis
	@$(PIP) --no-build-isolation --no-deps --upgrade --target $(VENV)-tensorflow/lib/python3*/site-packages -e .
	@touch $@

# Triton's Python backend corrupts tensors under NumPy 2. The server in nvidia-pytriton needs none of its dependencies.
$(VENV)-numpy1/.triton: $(VENV)-numpy1/.done
	@echo "installing Triton Inference Server"
	@$(VENV)-numpy1/bin/python -m pip install -q -c $(VENV)-numpy1/constraints.txt onnxruntime 'redis[hiredis]' rocksdict
	@$(VENV)-numpy1/bin/python -m pip install -q --no-deps nvidia-pytriton==0.7.0 tritonclient==2.51.0
	@touch $@
