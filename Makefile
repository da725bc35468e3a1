# Everything sets itself up: `make demo` and `make test` need Python ≥ 3.11 and make, nothing else.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
INSTALL := $(PIP) -c constraints.txt
# The platform that requirements.lock holds the hashes of; elsewhere constraints.txt alone applies.
LOCKED := $(shell $(PYTHON) -c 'import platform, sys; print(platform.python_implementation(), *sys.version_info[:2], \
	platform.system(), platform.machine(), platform.libc_ver()[0])' 2>/dev/null | grep -x 'CPython 3 11 Linux x86_64 glibc')

.PHONY: demo test lint types fast doctest bench clean lock audit compat

demo: .venv/.demo
	$(BIN)/equipoise demo --out runs/demo

test: lint types fast doctest

lint: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/.dev
	$(BIN)/mypy

fast: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not slow and not gpu"

doctest: .venv/.dev
	$(BIN)/pytest -q --doctest-modules src

bench: .venv/.dev
	for file in $(wildcard benchmarks/*.py); do $(BIN)/python $$file || exit 1; done

# The versions and hashes of this environment, after an upgrade that passed the tests.
lock: .venv/.dev
	$(BIN)/pip list --format=freeze | grep -viE '^(equipoise|torch|pip)==' > .venv/pins.txt
	$(PIP) --dry-run --ignore-installed --no-deps --report .venv/report.json -r .venv/pins.txt
	$(BIN)/python .ci/lock.py .venv/report.json > requirements.lock

# Known vulnerabilities of the locked packages, where the service of pip-audit can be reached.
audit:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/pip install --quiet --disable-pip-version-check pip-audit
	@.venv-audit/bin/pip-audit --timeout 20 --require-hashes --disable-pip -r requirements.lock > .venv-audit/log 2>&1; \
	code=$$?; cat .venv-audit/log; \
	if grep -q 'could not be audited' .venv-audit/log; then \
		echo "audit: $$(grep -c 'could not be audited' .venv-audit/log) packages are unknown to the service and were not checked"; fi; \
	if [ $$code -ne 0 ] && grep -qE 'ConnectionError|Connection|ServiceError|ProxyError|Timeout|HTTPError' .venv-audit/log; \
	then echo 'audit: the service cannot be reached from here; nothing was checked'; else exit $$code; fi

# Once a release: the fast tests with the oldest torch, and with the newest: make compat TORCH=2.6.0; make compat TORCH=.
# CPU wheels: make compat TORCH=2.6.0 TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH ?= 2.6.0
compat:
	$(PYTHON) -m venv --clear .venv-compat
	.venv-compat/bin/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) \
		'torch$(if $(filter-out .,$(TORCH)),==$(TORCH))'
	.venv-compat/bin/pip install --quiet -e '.[dev]'
	.venv-compat/bin/python -c 'import torch; print("torch", torch.__version__)'
	OMP_NUM_THREADS=1 .venv-compat/bin/python -m pytest -q -m "not slow and not gpu"

clean:
	rm -rf .venv .venv-audit .venv-compat .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info

.venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv .venv

# The stamps lie inside the environment, so that they go with it. One is renewed when what it installs
# from has changed; either may come first.
.venv/.demo: pyproject.toml constraints.txt requirements.lock | .venv
	$(if $(LOCKED),$(PIP) --require-hashes --no-deps -r requirements.lock)
	$(INSTALL) $(if $(LOCKED),--no-build-isolation) -e .
	touch $@

.venv/.dev: pyproject.toml constraints.txt requirements.lock | .venv
	$(if $(LOCKED),$(PIP) --require-hashes --no-deps -r requirements.lock)
	$(INSTALL) $(if $(LOCKED),--no-build-isolation) -e '.[dev]'
	-$(INSTALL) --no-deps torchattacks  # asks for torchvision and an old requests, and uses neither
	touch $@
