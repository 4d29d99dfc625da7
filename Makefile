# Everything a contributor runs. `make` alone lists the targets; each prints the command that it runs.

PYTHON     ?= python3
VENV       ?= .venv
VENV_FLAGS ?=
# Installed only where the environment has no torch yet. A known good version; any other from 2.9 up will do, for example
# `make install TORCH=torch==2.11.0`, or a machine's own torch: `make install VENV_FLAGS=--system-site-packages`.
TORCH      ?= torch==2.13.0
JOBS       ?= 2
ARGS       ?=
# Releases of Triton that `make check-kernels` compiles under besides the installed one: those that torch 2.11 and 2.14 bring.
TRITONS    ?= 3.6.0 3.8.0

BIN   := $(VENV)/bin
PY    := $(BIN)/python
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install generate demo test lint format docs bench check-kernels clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP)  ## make .venv and install the project into it, editable, with the tools for tests, docs, lint and demo

$(STAMP): pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; choose one with: make install PYTHON=python3.12")'
	@test -x $(PY) || echo "== making $(VENV)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	@$(PY) -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' \
		|| { echo "== installing $(TORCH)"; $(PY) -m pip install -q $(TORCH); }
	@echo "== installing forge-dsl and its tools"
	@$(PY) -m pip install -q -e '.[dev]'
	@touch $(STAMP)
	@echo "== ready: . $(BIN)/activate"

generate: $(STAMP)  ## write generated/ and docs/optimizers/ from optimizers/
	$(BIN)/forge-gen optimizers/ -o generated/ --docs docs/optimizers/ --strict

# Threads that spin while they wait make a machine that has other work ten times slower.
demo: $(STAMP)  ## train a small byte-level transformer without weight gradients, and beside it with torch.optim
	OMP_WAIT_POLICY=PASSIVE $(PY) examples/train_bytes.py $(ARGS)

test: $(STAMP)  ## run every test: tests/ and generated/tests/
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) $(ARGS)

lint: $(STAMP)  ## ruff, formatting, mypy --strict, and whether generated files are up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/forge-gen fmt --check optimizers/
	$(BIN)/forge-gen optimizers/ -o generated/ --docs docs/optimizers/ --strict --check

format: $(STAMP)  ## put Python files and specs into their canonical form
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/forge-gen fmt optimizers/

docs: $(STAMP)  ## build the documentation into site/
	$(BIN)/mkdocs build --strict

bench: $(STAMP)  ## time the compiler, and the kernels where there is a GPU
	$(PY) benchmarks/compiler.py
	@if $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then $(PY) benchmarks/kernel.py $(ARGS); \
	else echo "no GPU: kernels are not timed"; fi

check-kernels: $(STAMP)  ## compile all kernels with no GPU, for several, under this and other releases of Triton
	$(PY) benchmarks/hopper_registers.py $(ARGS)
	$(PY) benchmarks/portable_registers.py $(ARGS)
	@for release in $(TRITONS); do \
		test -d $(VENV)/triton-$$release || $(PY) -m pip install -q --no-deps --target $(VENV)/triton-$$release triton==$$release; \
		for kernels in hopper portable; do \
			PYTHONPATH=$(VENV)/triton-$$release $(PY) benchmarks/$${kernels}_registers.py $(ARGS) || exit 1; \
		done; \
	done

clean:  ## remove what was built (not .venv)
	rm -rf build dist site examples/output .mypy_cache .pytest_cache .ruff_cache .hypothesis
