# Everything runs in .venv, which is made on first use. On a fresh machine `make demo` and `make test` need only
# make and a Python >= 3.10 with its venv module.

PYTHON ?= python3
VENV   := .venv
BIN    := $(CURDIR)/$(VENV)/bin
# Versions that are installed: those of the file, the oldest that work (.ci/floor.txt), or the newest (.ci/newest.txt).
CONSTRAINTS ?= constraints.txt
# Of the thousands of modules that come, some hundreds are imported, and these are compiled then.
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS)

# The tests that `make test` leaves out (`make check` runs all), as a pytest -m expression.
MARKS  ?= not slow and not costly and not faults and not launch
# More for pytest: make test PYTEST_ARGS="-k sampler -x"
PYTEST_ARGS ?=
# How many processes run tests side by side. Tests wait for processes that start, so three keep two cores busy; each costs
# twelve seconds of processor time: it imports torch, collects the tests, and starts ranks of its own.
JOBS ?= 3
# For the table of faults: --rows F1,F9, --trials N, --kills N, --seed S (python -m tests.faults.table --help).
FAULTS_ARGS ?=
# For planted faults: --only optim, --only "clipped before", --new --record, --all (python -m tests.mutants --help).
MUTANTS_ARGS ?=
# For the delete test: --only fsdp, --jobs 1, tests to run (python -m tests.deletion --help).
DELETE_ARGS  ?=
# For drawn trainings: --seed S, --minutes M, --only N of a seed; --same_bits --recipes N (python -m tests.model --help).
MODEL_ARGS ?=

# For a machine with a GPU: --out FOLDER, --minutes M, --rows words, --dry_run (python -m benchmarks.gpu_session --help).
GPU_ARGS ?=

# Several processes share the cores in most of what runs here: one thread each is several times faster.
export OMP_NUM_THREADS ?= 1
# Without __pycache__ every process compiles all it imports again, and pytest rewrites all tests on each run.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test launch exhaustive quick house faults mutants delete-test model gpu messages lint format types layers docs docs-check check bench bench-peers clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

venv: $(VENV)/.installed-dev  ## make .venv with all that development needs

demo: $(VENV)/.installed-examples  ## train examples/digits on two processes of this machine
	cd examples/digits && $(BIN)/torchrun --standalone --nproc_per_node=2 train.py hparams.yaml

test: $(VENV)/.installed-dev  ## run the tests (GPU tests skip by themselves where there is none)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "$(MARKS)" $(PYTEST_ARGS)

# To collect all other tests would take as long as some of these.
LAUNCHING = tests/clusters $(shell grep -rl --include='*.py' 'mark[.]launch' tests)
launch: export DDPKIT_TEST_WHOLE_EXIT = 1
launch: $(VENV)/.installed-dev  ## run the tests with real launchers and clusters, of which there can be one at a time
	$(BIN)/python -m pytest -m "launch and not exhaustive" $(PYTEST_ARGS) $(LAUNCHING)

exhaustive: export DDPKIT_TEST_WHOLE_EXIT = 1
exhaustive: $(VENV)/.installed-ecosystem  ## run what shows the same on more recipes and sizes: half an hour or more, before a release
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "exhaustive and not launch" $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m "exhaustive and launch" $(PYTEST_ARGS) $(LAUNCHING)

# One area: a package with the tests beside it, or a module of the face with the tests of its name.
QUICK = $(wildcard ddpkit/$(PKG) ddpkit/$(PKG).py tests/$(PKG) $(foreach folder,unit contract ranks,tests/$(folder)/test_$(PKG)*.py))
quick: MARKS = not slow and not faults and not launch
quick: $(VENV)/.installed-dev  ## ruff and the tests of one area, in about half a minute: make quick PKG=data
	@test -n "$(PKG)" || { echo "Name a package or a module, as in: make quick PKG=data" >&2; exit 2; }
	@test -n "$(strip $(QUICK))" || { echo "There is no ddpkit/$(PKG), no ddpkit/$(PKG).py and no tests/*/test_$(PKG)*.py" >&2; exit 2; }
	$(BIN)/ruff check ddpkit tests
	$(BIN)/python -m pytest -m "$(MARKS)" $(PYTEST_ARGS) $(QUICK)

faults: $(VENV)/.installed-dev  ## the table of faults, with measured seconds: hours (FAULTS_ARGS="--rows F1,F9 --trials 5")
	$(BIN)/python -m tests.faults.campaign --sizes
	$(BIN)/python -m tests.faults.table $(FAULTS_ARGS)

mutants: $(VENV)/.installed-dev  ## plant each fault of a list, run the tests that could see it: half an hour or more (MUTANTS_ARGS="--only optim")
	$(BIN)/python -m tests.mutants $(MUTANTS_ARGS)

delete-test: $(VENV)/.installed-dev  ## run each quick test without all parts and strategies that it is not of: a quarter of an hour (DELETE_ARGS="--only fsdp": one alone)
	$(BIN)/python -m tests.deletion $(DELETE_ARGS)

model: $(VENV)/.installed-dev  ## compare drawn trainings with a plain loop, for ten minutes (MODEL_ARGS="--seed 3 --minutes 300")
	$(BIN)/python -m tests.model $(MODEL_ARGS)

messages: $(VENV)/.installed-dev  ## write the snapshot of all messages anew, after a change of texts
	$(BIN)/python -m tests.messages

house: $(VENV)/.installed-dev  ## the measures that may only get better: tokens of a line, dense lines, and others
	$(BIN)/python -m tests.house

lint: $(VENV)/.installed-dev  ## ruff
	$(BIN)/ruff check .

format: $(VENV)/.installed-dev  ## let ruff fix what it can and lay out the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed-dev  ## mypy --strict over the package
	$(BIN)/mypy

layers: $(VENV)/.installed-dev  ## imports go downward only
	$(BIN)/lint-imports

docs: $(VENV)/.installed-dev  ## build docs/_build/html, warnings are errors
	$(BIN)/sphinx-build -q -b html -n -W --keep-going docs docs/_build/html

# The theme makes the navigation of all pages anew for each of them, which is 40 % of a build: a check does without.
docs-check: $(VENV)/.installed-dev  ## the same in a plain theme, for the warnings
	$(BIN)/sphinx-build -q -b html -n -W --keep-going -D html_theme=basic docs docs/_build/check

# With `make -j2 check` what reads the code alone, and the pages, run beside the installation of the ecosystem. Then the launchers' tests, which mostly
# wait, run beside the others, of which there are fewer at a time then.
check: $(VENV)/.installed-dev  ## all of it, the slower tests too: what CI runs (`make exhaustive` has more of the same)
	$(MAKE) test launch lint types layers docs-check ECOSYSTEM=yes MARKS="not launch and not exhaustive" PYTEST_ARGS="--durations=20 $(PYTEST_ARGS)"

ifdef ECOSYSTEM
test launch: $(VENV)/.installed-ecosystem
endif

gpu: $(VENV)/.installed-dev  ## on a machine with a GPU: all that is to be seen there, in 12 minutes (GPU_ARGS="--minutes 9 --dry_run")
	$(BIN)/python -m benchmarks.gpu_session $(GPU_ARGS)

bench: $(VENV)/.installed-dev  ## microseconds per step above a bare PyTorch loop
	$(BIN)/python benchmarks/loop_overhead.py

bench-peers: $(VENV)/.installed-dev  ## a step in other libraries, each in an environment of its own in build/peers
	$(BIN)/python benchmarks/peers.py

clean:  ## remove what was built, cached or trained here (not .venv)
	rm -rf build dist *.egg-info docs/_build examples/*/results .ci/clone
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find ddpkit tests examples benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# A stamp is older than the file that changed: the same command installs again what has changed.
$(VENV)/.installed-dev: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "Installing ddpkit[dev] into $(VENV). The first time this downloads PyTorch and takes minutes."
	@$(PIP) -e ".[dev]"
	@touch $(VENV)/.installed-examples $@
	@echo "Installed."

$(VENV)/.installed-ecosystem: $(VENV)/.installed-dev
	@echo "Installing ddpkit[ecosystem] into $(VENV): other libraries' data, trackers and starters, for the slower tests. It takes minutes and more than 1 GB."
	@$(PIP) -e ".[ecosystem]"
	@touch $@
	@echo "Installed."

$(VENV)/.installed-examples: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "Installing ddpkit[examples] into $(VENV). The first time this downloads PyTorch and takes minutes."
	@$(PIP) -e ".[examples]"
	@touch $@
	@echo "Installed."

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	    echo "ddpkit needs Python 3.10 or newer, and '$(PYTHON)' says: $$($(PYTHON) --version 2>&1 | head -n 1). Install one and name it: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	    echo "'$(PYTHON)' has no venv module. Install it (Debian and Ubuntu: apt install python3-venv) and run make $(MAKECMDGOALS) again." >&2; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version)."
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
