# make train | make test: each does all its own set-up. make test-all: every test, not the quick ones
# alone. make check: lint and types.
SHELL := bash
VENV ?= .venv
GPU_EXTRA := $(shell .ci/extras)
# What is installed beside the package; a GPU adds JAX's CUDA plugin.
EXTRAS ?= test$(GPU_EXTRA)
PIP_ARGS ?=
PYTEST_ARGS ?=
TRAIN_ARGS ?=
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$(( n < 8 ? n : 8 )))
, := ,
STAMP := $(VENV)/installed-$(subst $(,),-,$(EXTRAS))
# Without a GPU nothing but the CPU is asked, even where the CUDA plugin is installed.
PLATFORM := $(if $(GPU_EXTRA),,JAX_PLATFORMS=cpu)

.PHONY: train test test-all replay check format venv clean

train: $(STAMP)
	$(PLATFORM) $(VENV)/bin/python examples/train_lm.py $(TRAIN_ARGS)

# A process has tests that follow each other, which share programs that are compiled once, and takes
# some of another's when it has none left.
SPREAD = -n $(WORKERS) --dist worksteal

# tests/conftest.py says what the two markers are for; the run ends by saying how many it left out.
test: $(STAMP)
	$(VENV)/bin/python -m pytest $(SPREAD) -m 'not slow and not cuda_compiler' $(PYTEST_ARGS)

test-all: $(STAMP)
	$(VENV)/bin/python -m pytest $(SPREAD) $(PYTEST_ARGS)

# In one process, because cases that follow each other share what they are compared with.
replay: $(STAMP)
	$(VENV)/bin/python -m pytest -n 0 -m replay $(PYTEST_ARGS)

check:
	@$(MAKE) --no-print-directory venv EXTRAS=dev$(GPU_EXTRA)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyrefly check --python-interpreter-path $(VENV)/bin/python

format:
	@$(MAKE) --no-print-directory venv EXTRAS=dev$(GPU_EXTRA)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

venv: $(STAMP)

$(STAMP): pyproject.toml
	python=$$(.ci/find-python) && "$$python" -m venv $(VENV)
	$(VENV)/bin/python -m pip install -qq --disable-pip-version-check --upgrade pip
	$(VENV)/bin/python -m pip install -qq --disable-pip-version-check -e ".[$(EXTRAS)]" $(PIP_ARGS)
	touch $@

# Without mkdocs-material's notice that it is being succeeded.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs

.PHONY: docs docs-serve

docs:
	@$(MAKE) --no-print-directory venv EXTRAS=docs
	$(MKDOCS) build --strict

docs-serve:
	@$(MAKE) --no-print-directory venv EXTRAS=docs
	$(MKDOCS) serve

clean:
	rm -rf .venv .venv-oldest .venv-newest out build *.egg-info .pytest_cache .ruff_cache
