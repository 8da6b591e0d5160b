PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Tests start hundreds of processes; each would compile the package anew, and each pytest process all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-vllm test-ascend test-sglang test-pd test-backends lint campaign bench bench-vllm bench-pd clean

setup: $(STAMP)

# torch first and by itself: its pinned CPU build, not the newest one with gigabytes of CUDA packages.
$(STAMP): pyproject.toml constraints.txt src/layerflow/ops/_copy.c
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -f src/layerflow/ops/_copy.cpython-*.so  # Python would take such a build of an earlier version first
	@echo 'into $(VENV): torch for the CPU, then the rest; 1.2 GB of disk and some minutes, once'
	$(PIP) install -c constraints.txt torch numpy
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch $@

# PD=1: prefill and decode in engines of their own. POOL=disk, mooncake, memcache or redis: the same, with every load from there. memcache runs on the emulated CANN.
PACKAGED := $(filter mooncake memcache redis,$(POOL))
demo: $(STAMP)
	$(if $(PACKAGED),tests/backends/with.sh )$(BIN)/layerflow demo$(DEMO_FLAGS)
DEMO_FLAGS = $(if $(PD), --pd)$(if $(DEVICE), --device $(DEVICE))$(if $(POOL), --pool $(POOL))$(if $(filter memcache,$(POOL)), --cann-emulator tests/npu/emulator)

# Three tests beside each other for two cores; an idle process takes over half of what another has left.
# Ends with the npu path: the real torch_npu under an emulated CANN, in an environment of its own.
test: lint
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal
	tests/npu/run.sh

# A real vLLM on the CPU, in an environment of its own (2.5 GB).
test-vllm:
	tests/vllm/run.sh

# vLLM-Ascend's own engine over the emulated CANN, its kernels computed on the host; in an environment of its own, which
# shares most files with test-vllm's (0.5 GB more).
test-ascend:
	tests/ascend/run.sh

# A real SGLang on the CPU, with stand-ins for its kernels, in an environment of its own (2.5 GB).
test-sglang:
	tests/sglang/run.sh

# Prefill and decode in vLLMs of their own, behind layerflow's proxy and somebody else's router.
test-pd: $(STAMP)
	tests/pd/run.sh

# Real Mooncake and memcache servers on this machine; their packages go into .venv.
test-backends: $(STAMP)
	tests/backends/run.sh
	tests/npu/run.sh past-the-arena

lint: $(STAMP)
	$(BIN)/ruff check src cli testing tests bench examples
	$(BIN)/ruff format --check src cli testing tests bench examples
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/lint-imports --no-logo --config imports-acyclic.toml

# The long forms of the fault tests: dozens of kills each.
campaign: $(STAMP)
	$(BIN)/python -m pytest -m campaign --timeout 1800
	tests/backends/run.sh -m campaign --timeout 1800
	tests/vllm/run.sh -m campaign
	tests/ascend/run.sh -m campaign --timeout 3600
	tests/sglang/run.sh -m campaign
	tests/pd/run.sh -m campaign

bench: $(STAMP)
	$(BIN)/layerflow bench all --json bench.json

# The same vLLM with its own prefix cache, with LMCache's server and with layerflow, in one run.
bench-vllm: $(STAMP)
	bench/vllm/setup.sh
	$(BIN)/python -m bench.vllm --out $(or $(OUT),bench-vllm.json)

# The first token of prompts that one vLLM prefills and another decodes, beside a single vLLM and NixlConnector.
bench-pd: $(STAMP)
	bench/pd/setup.sh
	$(BIN)/python -m bench.pd --out $(or $(OUT),bench-pd.json)

clean:
	rm -rf $(VENV) .venv-npu .venv-vllm* .venv-ascend .venv-sglang .venv-lmcache build out bench.json bench-vllm.json bench-pd.json
