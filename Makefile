# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
# Test processes; each runs on one thread. Each begins with its share of the files in their order, and whichever is done first takes over half
# of what the other has left: a file's tests share what they compute, and no core waits at the end.
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal
# What an installation depends on: when one of these changes, the next command installs again.
INSTALLED_FROM := pyproject.toml constraints.txt $(wildcard setup.py lightning_megatrain/optim/*.[ch])

.PHONY: demo test test-long test-all lint format typecheck clean

demo: $(VENV)/installed
	$(BIN)/python examples/demo.py

test: lint
	$(PYTEST) -m "not long"

# Tests that fork a trainer have a process to themselves: autograd's threads for other devices would not survive the fork.
FORKING := tests/callbacks/test_two_processes.py tests/language_model/test_two_processes.py

test-long: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m long $(FORKING)
	$(PYTEST) -m long $(addprefix --ignore=,$(FORKING))

# Quick and long tests in one go.
test-all: lint
	$(PYTEST) $(addprefix --ignore=,$(FORKING))
	$(BIN)/python -m pytest $(FORKING)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Also a test. It reads the installed wheel, so lightning_megatrain/callbacks/x.py in its output is callbacks/x.py in the tree.
typecheck: $(VENV)/installed-dev
	$(BIN)/python -m pytest tests/packaging -k mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Modules are compiled when they are first imported, as most of some 15000 never are.
PIP_INSTALL := $(BIN)/pip install --no-compile --constraint constraints.txt

$(VENV)/installed: $(INSTALLED_FROM) | $(BIN)/python
	$(PIP_INSTALL) --editable .
	touch $@

$(VENV)/installed-dev: $(INSTALLED_FROM) | $(BIN)/python
	$(PIP_INSTALL) --editable '.[dev]'
	touch $@
