# Every target sets itself up: a virtual environment in $(VENV), with the pinned torch of constraints.txt.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
QUESTION ?= What is the capital of France, and what is it known for?

.PHONY: help install native demo test test-slow test-sanitizers test-gpu lint docs format clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "plait needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt 'nanobind>=2.4' 'scikit-build-core>=0.10' cmake ninja
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

install: $(VENV)/.installed  ## make the environment and install plait into it

native: $(VENV)/.installed  ## compile what changed in csrc
	PLAIT_REQUIRE_NATIVE=1 $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .

demo: $(VENV)/.installed  ## a small real model answers a question; the hybrid that comes along thinks, calls and remembers
	$(BIN)/plait generate --chat smollm2-135m "$(QUESTION)" --temperature 0 --max-tokens 60
	$(BIN)/python tools/demo.py

test: lint  ## everything that must hold; minutes
	$(PYTEST) -m "not slow and not gpu"

test-slow: $(VENV)/.installed  ## the longer checks
	$(PYTEST) -m slow --timeout 3600

test-sanitizers: $(VENV)/.installed  ## the C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer
	$(BIN)/python tests/sanitizers.py

test-gpu: $(VENV)/.installed  ## the checks that need a CUDA device
	$(PYTEST) -m gpu -rs

lint: $(VENV)/.installed  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed  ## write docs/flags.md anew
	$(BIN)/python tools/flags_page.py

format: $(VENV)/.installed  ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
