# `make demo` and `make test` do all their own set-up. Everything lands in .venv (and .venv-vllm for the engine tests).
PYTHON ?= python3
# The release that the tests are run with. On a machine without a GPU, PIP_EXTRA_INDEX_URL may name PyTorch's CPU index.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# vLLM pins much that the rest does not; its CPU build has its own environment, made from tests/vllm/requirements*.txt.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_PIP := $(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-core test-vllm lint fuzz clean

$(VENV)/.base: pyproject.toml setup.py $(wildcard src/nibblekv/backends/cpu/csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	$(PIP) --editable '.[hf,cli]'
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) --editable '.[all,peers,dev]'
	touch $@

$(VLLM_VENV)/.base: pyproject.toml setup.py $(wildcard src/nibblekv/backends/cpu/csrc/*) tests/vllm/requirements.txt tests/vllm/requirements-no-deps.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) '$(TORCH)'
	$(VLLM_PIP) --no-deps --requirement tests/vllm/requirements-no-deps.txt
	$(VLLM_PIP) --requirement tests/vllm/requirements.txt
	$(VLLM_PIP) --no-deps --editable .
	touch $@

demo: $(VENV)/.base
	$(BIN)/nibblekv demo

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: test-core test-vllm

test-core: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto

test-vllm: $(VLLM_VENV)/.base
	$(VLLM_BIN)/python -m pytest tests/vllm

# Seconds of differential fuzzing, shared by the backends of this machine.
SECONDS ?= 60
fuzz: $(VENV)/.dev
	$(BIN)/python tests/fuzz.py --seconds $(SECONDS)

clean:
	rm -rf $(VENV) $(VLLM_VENV) build
