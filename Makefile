# Everything sets itself up: `make demo` and `make test` need Python ≥ 3.11 and make, nothing else.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint types fast doctest bench clean

demo: .venv/.demo
	$(BIN)/equipoise demo --out runs/demo

test: lint types fast doctest

lint: .venv/.dev
	$(BIN)/ruff check .

types: .venv/.dev
	$(BIN)/mypy

fast: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not slow and not gpu"

doctest: .venv/.dev
	$(BIN)/pytest -q --doctest-modules src

bench: .venv/.dev
	for file in $(wildcard benchmarks/*.py); do $(BIN)/python $$file || exit 1; done

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info

.venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv .venv

# The stamps lie inside the environment, so that they go with it. One is renewed when what it installs
# from has changed; either may come first.
.venv/.demo: pyproject.toml constraints.txt | .venv
	$(INSTALL) -e .
	touch $@

.venv/.dev: pyproject.toml constraints.txt | .venv
	$(INSTALL) -e '.[dev]'
	-$(INSTALL) --no-deps torchattacks  # asks for torchvision and an old requests, and uses neither
	touch $@
