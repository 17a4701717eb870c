# make train, make test: both install what they need. make test-all: every test, not only the quick
# ones. make check: lint and types. make gpu: what users run on GPUs, on this machine's.
# make test-frameworks: MaxText, tunix and others, patched as the documentation says.
SHELL := bash
# VENV= (empty) runs $(PYTHON) as it is, on a machine that can install nothing.
VENV ?= .venv
GPU_EXTRA := $(shell .ci/extras)
# Extras of the package that are installed; a GPU adds JAX's CUDA plugin.
EXTRAS ?= test$(GPU_EXTRA)
DEV ?= dev$(GPU_EXTRA)
DOCS ?= docs
PIP_ARGS ?=
PYTEST_ARGS ?=
TRAIN_ARGS ?=
GPU_ARGS ?=
FRAMEWORKS ?= plain_jax equinox tunix maxtext levanter grug skyrl
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$(( n < 8 ? n : 8 )))
, := ,
STAMP := $(if $(VENV),$(VENV)/installed-$(subst $(,),-,$(EXTRAS)))
RUN := $(if $(VENV),$(VENV)/bin/python,$(or $(PYTHON),python3))
# Without a GPU JAX initializes the CPU alone, even if the CUDA plugin is installed.
PLATFORM := $(if $(GPU_EXTRA),,JAX_PLATFORMS=cpu)

.PHONY: train test test-all replay gpu test-frameworks check format venv clean

train: $(STAMP)
	$(PLATFORM) $(RUN) examples/train_lm.py $(TRAIN_ARGS)

# A worker runs consecutive tests, which share compiled programs, and then takes over some of another
# worker's. Compiled programs stay in .pytest_cache/jax for the next run (tests/conftest.py).
SPREAD = -n $(WORKERS) --dist worksteal

# tests/conftest.py explains the markers; the summary counts the tests that were left out.
QUICK = not slow and not cuda_compiler and not mosaic_interpreter
test: $(STAMP)
	$(RUN) -m pytest $(SPREAD) -m '$(QUICK)' $(PYTEST_ARGS)

test-all: $(STAMP)
	$(RUN) -m pytest $(SPREAD) $(PYTEST_ARGS)

# In one process: consecutive cases share their reference.
replay: $(STAMP)
	$(RUN) -m pytest -n 0 -m replay $(PYTEST_ARGS)

# tests/gpu/run_parts.py lists the parts and the exit statuses.
gpu: $(STAMP)
	$(RUN) tests/gpu/run_parts.py $(GPU_ARGS)

# Each in an environment of its own, which holds the framework's released package: 7 GB in all.
test-frameworks:
	.ci/test-framework $(FRAMEWORKS)

check:
	@$(MAKE) --no-print-directory venv EXTRAS=$(DEV)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyrefly check --python-interpreter-path $(VENV)/bin/python

format:
	@$(MAKE) --no-print-directory venv EXTRAS=$(DEV)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

venv: $(STAMP)

ifneq ($(VENV),)
$(STAMP): pyproject.toml
	python=$$(.ci/find-python) && "$$python" -m venv $(VENV)
	$(VENV)/bin/python -m pip install -qq --disable-pip-version-check --upgrade pip
	$(VENV)/bin/python -m pip install -qq --disable-pip-version-check -e ".[$(EXTRAS)]" $(PIP_ARGS)
	touch $@
endif

# Without mkdocs-material's notice about its successor.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs

.PHONY: docs docs-serve

docs:
	@$(MAKE) --no-print-directory venv EXTRAS=$(DOCS)
	$(MKDOCS) build --strict

docs-serve:
	@$(MAKE) --no-print-directory venv EXTRAS=$(DOCS)
	$(MKDOCS) serve

clean:
	rm -rf .venv .venv-oldest .venv-newest .venv-frameworks out build *.egg-info .pytest_cache .ruff_cache .hypothesis
