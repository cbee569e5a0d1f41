# Everything runs in .venv of this folder; `make setup` makes it, the other targets go through it.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Of pip's many lines: the large downloads, what is built here, and errors.
BRIEF := awk '/Downloading .*\([0-9][0-9]+\.[0-9] MB\)/ || /^(Building|Installing|ERROR|error)/ {print "  " substr($$0, 1, 100); fflush()}'

.PHONY: help
help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

.PHONY: setup
setup: .venv/.setup-done  ## .venv with everything the pipeline, the demo and the tests need

.venv/.setup-done: pyproject.toml constraints.txt
	@python=$$(bash docker/find-python.sh "$${PYTHON:-}"); \
	if [ ! -x $(BIN)/python ]; then \
	  echo "setup: making .venv with $$($$python --version) ($$python)"; \
	  "$$python" -m venv .venv; \
	fi
	@echo "setup: installing the pinned packages of constraints.txt (about 500 MB to fetch, some minutes)"
	@$(PIP) install --progress-bar off -c constraints.txt -e '.[dev,embedded]' | $(BRIEF)
	@echo "setup: compiling the kernels (a minute or so, once)"
	@$(BIN)/python -m streams.warm
	@touch $@
	@echo "setup: done"

.PHONY: train-setup
train-setup: .venv/.train-done  ## also what training needs: torch, the CUDA build on Linux, about 3 GB to fetch

.venv/.train-done: .venv/.setup-done
	@echo "train-setup: installing torch and the ONNX exporter (about 3 GB to fetch on Linux, some minutes)"
	@$(PIP) install --progress-bar off -c constraints.txt -e '.[dev,embedded,train]' | $(BRIEF)
	@touch $@
	@echo "train-setup: done"

.PHONY: demo
demo: setup  ## simulated log -> embedded broker -> ranked ads, with nothing but Python
	@$(BIN)/solaris demo $(ARGS)

.PHONY: up
up: setup  ## a real Kafka (Docker Compose, else on Java) and the roles, in the background
	@$(BIN)/solaris up $(ARGS)

.PHONY: down
down: setup  ## stop what `make up` started; data is kept (ARGS=--wipe removes it)
	@$(BIN)/solaris down $(ARGS)

.PHONY: lint
lint: setup  ## ruff and mypy
	@echo "lint: ruff check, ruff format, mypy"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "lint: ruff format would change files: $(BIN)/ruff format --diff ." >&2; exit 1; }
	@$(BIN)/mypy

.PHONY: test
test: lint  ## lint, then all tests; training tests where torch is installed (make train-setup)
	@echo "test: pytest (unit, contract, broker, chaos)"
	@$(BIN)/python -m pytest $(ARGS)

.PHONY: chaos-quick
chaos-quick: setup  ## some kills of roles and broker under a replayed log, then the audit; minutes, needs Java
	@$(BIN)/python tests/chaos/runner.py --quick $(ARGS)

.PHONY: chaos
chaos: setup  ## the long form: every named point, freezes, swaps, at least 50 kills; about 20 minutes
	@$(BIN)/python tests/chaos/runner.py $(ARGS)

.PHONY: soak
soak: train-setup  ## an hour at a steady rate: memory, disk, files and threads must stay flat; writes docs/soak
	@$(BIN)/python tests/chaos/soak.py $(ARGS)

.PHONY: fuzz
fuzz: setup  ## coverage-guided fuzzing of every decoder, 45 s each; installs atheris (Linux, CPython 3.11 to 3.13)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(PIP) install -q atheris==3.0.0
	@$(BIN)/python tests/fuzz/fuzz.py $(ARGS)

.PHONY: bench
bench: setup  ## every role beside its floor and its peers, on a real Kafka; writes docs/benchmarks.md and docs/scale.md
	@$(BIN)/python benchmarks/bench.py $(ARGS)
	@test -n "$(ARGS)" || $(BIN)/python benchmarks/scale_sim.py --bench reports/bench.json --page docs/scale.md

.PHONY: bench-quick
bench-quick: setup  ## the same in under 4 minutes, without Quix Streams and Kafka Streams
	@$(BIN)/python benchmarks/bench.py --quick $(ARGS)
