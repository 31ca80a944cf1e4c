# `make demo` and `make test` do all their own set-up. Everything lands in .venv (and .venv-vllm for the engine tests).
PYTHON ?= python3
# The release that the tests are run with. On a machine without a GPU, PIP_EXTRA_INDEX_URL may name PyTorch's CPU index.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test lint fuzz clean

$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	$(PIP) --editable '.[hf,cli]'
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) --editable '.[all,peers,dev]'
	touch $@

demo: $(VENV)/.base
	$(BIN)/nibblekv demo

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(VENV)/.dev
	$(BIN)/python -m pytest

# Seconds of differential fuzzing, shared by the backends of this machine.
SECONDS ?= 60
fuzz: $(VENV)/.dev
	$(BIN)/python tests/fuzz.py --seconds $(SECONDS)

clean:
	rm -rf $(VENV) .venv-vllm build
