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

.PHONY: demo test test-core test-vllm lint docs fuzz soak coverage asan clean

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

$(VENV)/.docs: $(VENV)/.base
	$(PIP) --editable '.[docs]'
	touch $@

# Warnings are errors (mkdocs.yml).
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Seconds of differential fuzzing, shared by the backends of this machine, the Triton kernels in their interpreter among
# them, in JOBS processes at once; JSON=FILE keeps a summary, whose findings REPLAY=FILE runs again.
SECONDS ?= 60
JOBS ?= 1
fuzz: $(VENV)/.dev
	TRITON_INTERPRET=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -W ignore tests/fuzz.py \
		--seconds $(SECONDS) --jobs $(JOBS) $(if $(JSON),--json $(JSON)) $(if $(REPLAY),--replay $(REPLAY))

# Minutes of mixed requests through vLLM's engine on CPU.
MINUTES ?= 60
soak: $(VLLM_VENV)/.base
	$(VLLM_BIN)/python tests/vllm/soak.py --minutes $(MINUTES)

# Lines of src/ that the tests run: both suites, the Triton kernels in their interpreter. FEW parameter sets of every test
# (FEW= for all of them, twice as long as `make test`) without the soak: at least so many lines are run; the figures are kept.
FEW ?= 3
COVERAGE := $(CURDIR)/build/coverage
RUN_COVERAGE := -m 'not soak' --cov --cov-report= --durations=20
coverage: export PYTEST_ADDOPTS = $(if $(FEW),--few $(FEW))
coverage: $(VENV)/.dev $(VLLM_VENV)/.base
	rm -rf $(COVERAGE)
	COVERAGE_FILE=$(COVERAGE)/core $(BIN)/python -m pytest tests -n auto $(RUN_COVERAGE)
	COVERAGE_FILE=$(COVERAGE)/vllm $(VLLM_BIN)/python -m pytest tests/vllm $(RUN_COVERAGE)
	$(BIN)/python tests/coverage_summary.py $(COVERAGE) --few '$(FEW)' --json benchmarks/results/coverage.json

# The CPU kernels, built to check every address and every undefined operation, under their tests and the fuzzer.
ASAN := build/asan
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1
RUN_ASAN := LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(ASAN)/lib $(BIN)/python
asan: $(VENV)/.dev
	$(PIP) 'setuptools>=77'
	CFLAGS='$(SANITIZE)' CXXFLAGS='$(SANITIZE)' LDFLAGS='-fsanitize=address,undefined' \
		$(BIN)/python setup.py -q build --build-lib $(ASAN)/lib --build-temp $(ASAN)/temp
	$(RUN_ASAN) -m pytest -n 0 -q tests/test_cpu_write.py tests/test_cpu_attention.py
	$(RUN_ASAN) tests/fuzz.py --backend cpu --seconds $(SECONDS)

clean:
	rm -rf $(VENV) $(VLLM_VENV) build
