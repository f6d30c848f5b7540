PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup study test lint types tests clean

setup: $(VENV)/.installed  ## .venv with the package, its extras and the test tools

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "wellposed needs Python 3.11 or later, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

study: setup  ## the main result: a table and a page, in a few minutes on a CPU
	$(BIN)/wellposed study --out runs/study

test: lint types tests  ## everything that must pass before a change lands

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup
	$(BIN)/mypy

tests: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses=2 $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache
