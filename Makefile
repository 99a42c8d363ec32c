# Everything runs in .venv, which `make venv` makes from the pins in constraints.txt.
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(if $(shell $(p) -c 'import sys; sys.exit(not (3,11) <= sys.version_info < (3,14))' 2>/dev/null && echo ok),$(p))))
BIN := .venv/bin

.PHONY: venv demo test soak lint format

venv: .venv/.made

.venv/.made: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11, 3.12 or 3.13 found. Install one, or say PYTHON=/path/to/python."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: venv
	@$(BIN)/python -m jobs.digits.demo

test: venv
	$(BIN)/pytest -m "not soak"

soak: venv
	REBUILDS=50 DEATHS=100 LOADED_S=3600 $(BIN)/pytest -m "soak or not soak"

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
