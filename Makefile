# Everything sets itself up: `make demo` and `make test` need Python ≥ 3.11 and make, nothing else.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint types fast doctest bench clean

demo: .stamps/demo
	$(BIN)/equipoise demo --out runs/demo

test: lint types fast doctest

lint: .stamps/dev
	$(BIN)/ruff check .

types: .stamps/dev
	$(BIN)/mypy

fast: .stamps/dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not slow and not gpu"

doctest: .stamps/dev
	$(BIN)/pytest -q --doctest-modules src

bench: .stamps/dev
	for file in benchmarks/*.py; do $(BIN)/python $$file || exit 1; done

clean:
	rm -rf .venv .stamps .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info

.venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv .venv

# A stamp is renewed when what it installs from has changed; either may come first.
.stamps/demo: pyproject.toml constraints.txt | .venv
	$(INSTALL) -e .
	mkdir -p .stamps && touch $@

.stamps/dev: pyproject.toml constraints.txt | .venv
	$(INSTALL) -e '.[dev]'
	mkdir -p .stamps && touch $@
