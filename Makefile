# Two commands matter: `make run` (the main job, end to end) and `make test` (everything that needs no GPU).
# Both make the environment first. PYTHON, VENV and TORCH_INDEX can be set on the command line.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Where there is no NVIDIA driver the CPU build of torch is enough (and 10 times smaller).
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi 2>/dev/null),,https://download.pytorch.org/whl/cpu)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: FORCE help run serve test check lint types unit http property beside rest format soak bench bench-gpu test-gpu test-sglang test-clients clean
.DEFAULT_GOAL := help

help: ## list these commands
	@awk -F':.*## ' '/^[a-z -]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.engine ## the main job: a prompt larger than one rank, end to end, checked bit for bit; ARGS="..."
	@$(BIN)/cpkv demo $(ARGS)

serve: $(VENV)/.engine ## the OpenAI-compatible server on the demo model; ARGS="..." adds flags
	@$(BIN)/cpkv serve --model-path demo --enable-metrics $(ARGS)

test: lint ## everything that needs no GPU
	@$(MAKE) --no-print-directory -j3 unit http beside
	@$(MAKE) --no-print-directory -j2 rest $(ALSO)

check: lint ## format, lint, types, layers, docs/api, unit and property tests
	@$(MAKE) --no-print-directory -j3 unit http property

# The parts of these two, of their own only so that two cores are used; those of the server mostly wait. ALSO names
# targets that run beside the last part, which leaves most of a core idle.
ALSO ?=
NO_GPU := -m "not gpu and not soak"
HTTP := tests/unit/server
BESIDE := tests/property tests/kernels tests/docs

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	@$(BIN)/python docs/generate_api.py --check

types: $(VENV)/.dev
	$(BIN)/pyright

unit: $(VENV)/.dev
	$(BIN)/python -m pytest tests/unit --ignore $(HTTP)

http: $(VENV)/.dev
	$(BIN)/python -m pytest $(HTTP)

property: types
	$(BIN)/python -m pytest tests/property

beside: types
	$(BIN)/python -m pytest $(NO_GPU) $(BESIDE)

rest: $(VENV)/.dev
	$(BIN)/python -m pytest $(NO_GPU) $(addprefix --ignore ,tests/unit $(BESIDE)) $(ARGS)

format: $(VENV)/.dev ## rewrite the sources in the project's format, and docs/api from the docstrings
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python docs/generate_api.py

soak: $(VENV)/.dev ## the long run: N = 8 and longer random schedules
	$(BIN)/python -m pytest -m soak tests

bench: $(VENV)/.dev ## CPU benchmarks; raw samples go to benchmarks/results
	$(BIN)/python -m benchmarks

# A python that has torch for CUDA, triton and pytest already, instead of $(VENV): GPU_PYTHON=python3
GPU_PYTHON ?=
ON_GPU = PYTHONPATH="src:.:$$PYTHONPATH" $(or $(GPU_PYTHON),$(BIN)/python)
GPU_NEEDS = $(if $(GPU_PYTHON),,$(VENV)/.dev)

bench-gpu: $(GPU_NEEDS) ## benchmarks on two NVIDIA GPUs; ARGS="--help" lists the options
	$(ON_GPU) -m benchmarks.gpu $(ARGS)

test-gpu: $(GPU_NEEDS) ## tests of kernels, and of reads and transfers between GPUs, on two NVIDIA GPUs
	@$(ON_GPU) -m cp_shared_kv.kernels.needs 2
	$(ON_GPU) -m pytest tests/kernels tests/gpu $(ARGS)
	$(ON_GPU) -m pytest -m gpu tests/faults/test_transport_contract.py $(ARGS)

# On top of the environment of the other tests: what it has itself goes first.
SGLANG := $(CURDIR)/.cache/sglang
SGLANG_NEWER := 0.5.12.post1

test-sglang: $(SGLANG)/.ready ## tests of the SGLang plugin against SGLang itself, two releases, on a CPU
	$(SGLANG)/bin/python -m pytest tests/sglang $(ARGS)
	CPKV_SGLANG_SITE=$(SGLANG)/$(SGLANG_NEWER) $(SGLANG)/bin/python -m pytest tests/sglang $(ARGS)

# Each client in an environment of its own: their releases of common packages differ from ours.
CLIENTS := $(CURDIR)/.cache/clients

test-clients: $(CLIENTS)/.ready ## runs of SGLang's bench_serving and of AIPerf, unmodified, against the server
	CPKV_CLIENTS=$(CLIENTS) $(BIN)/python -m pytest tests/clients -m clients $(ARGS)

clean: ## remove the environment and every cache
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# A TORCH_INDEX that is given changes an environment of another; one that is not, never.
TORCH_CHOICE := index=$(TORCH_INDEX)
ifneq ($(origin TORCH_INDEX),file)
ifneq ($(shell cat $(VENV)/.torch 2>/dev/null),$(TORCH_CHOICE))
$(VENV)/.torch: FORCE
endif
endif
FORCE:

$(VENV)/.torch:
	@[ "$$(uname -s)" = Linux ] || { echo "cp-shared-kv runs on Linux only; this is $$(uname -s). Use a Linux machine, VM or container." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make run PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make a virtual environment; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@[ ! -e $@ ] || { echo "removing the torch that is there ..."; rm -f $@; $(BIN)/pip uninstall -q -y torch; }
	@echo "installing torch (once) ..."
	@[ -z "$(TORCH_INDEX)" ] || $(BIN)/pip install -q --no-deps --retries 1 --timeout 20 --index-url "$(TORCH_INDEX)" 'torch>=2.11,<2.14' || echo "no torch from $(TORCH_INDEX); pip's default build follows (several GB)"
	@echo "$(TORCH_CHOICE)" > $@

$(VENV)/.engine: $(VENV)/.torch pyproject.toml
	@echo "installing cp-shared-kv (once) ..."
	@$(BIN)/pip install -q -e '.[engine]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@echo "installing cp-shared-kv with its test tools (once) ..."
	@$(BIN)/pip install -q -e '.[dev]'
	@touch $@ $(VENV)/.engine

$(SGLANG)/.ready: $(VENV)/.dev tests/sglang/requirements.txt tests/sglang/requirements-no-deps.txt
	@echo "installing SGLang for tests (once, 1 GB) ..."
	@$(BIN)/python -m venv --without-pip $(SGLANG)
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  > $$($(SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth
	@$(BIN)/pip --python $(SGLANG)/bin/python install -q -r tests/sglang/requirements.txt
	@$(BIN)/pip --python $(SGLANG)/bin/python install -q --no-deps -r tests/sglang/requirements-no-deps.txt
	@$(BIN)/pip install -q --no-deps --target $(SGLANG)/$(SGLANG_NEWER) sglang==$(SGLANG_NEWER)
	@touch $@

$(CLIENTS)/.ready: $(VENV)/.dev $(wildcard tests/clients/requirements-*.txt)
	@echo "installing benchmark clients (once, several GB) ..."
	@$(PYTHON) -m venv $(CLIENTS)/sglang
	@$(CLIENTS)/sglang/bin/pip install -q -r tests/clients/requirements-sglang.txt
	@$(CLIENTS)/sglang/bin/pip install -q --no-deps -r tests/clients/requirements-sglang-no-deps.txt
	@$(PYTHON) -m venv $(CLIENTS)/aiperf
	@$(CLIENTS)/aiperf/bin/pip install -q -r tests/clients/requirements-aiperf.txt
	@touch $@
