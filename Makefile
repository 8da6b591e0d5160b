PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: setup demo test lint bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt src/layerflow/ops/_copy.c
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch numpy
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/layerflow demo

test: lint
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check src cli tests bench
	$(BIN)/ruff format --check src cli tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/layerflow bench all --json bench.json

clean:
	rm -rf $(VENV) build *.egg-info
