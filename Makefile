# `make` lists the targets. ARGS is passed on: `make train ARGS="--epochs 5"`, `make test ARGS="-k resume"`.
# JOBS is the number of tests that run at once: each further worker imports everything again.
PYTHON ?= python3
ARGS ?=
JOBS ?= 2
BIN := .venv/bin
INSTALLED := .venv/.installed
TRAINABLE := .venv/.trainable
# Tests that share a trained run go to one worker: see tests/selection.py.
PYTEST := $(BIN)/pytest -q -n $(JOBS) --dist loadgroup
FAST := -m "not slow"
# Hundreds of processes start: without stored bytecode each would compile the sources first.
export PYTHONDONTWRITEBYTECODE :=
REPEATEDLY := $(BIN)/pytest -q --effort 100 --timeout 3600

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

setup: $(INSTALLED) ## Install everything into .venv

# Training needs fewer packages than development, so it installs faster.
$(INSTALLED): EXTRAS := dev
$(TRAINABLE): EXTRAS := vision,report
$(INSTALLED) $(TRAINABLE): pyproject.toml constraints.txt
	@echo "Installing into .venv: a few minutes the first time"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@ $(TRAINABLE)

train: $(TRAINABLE) ## Train a small ResNet on the digits that come with scikit-learn
	@$(BIN)/python recipes/cifar.py --config recipes/configs/digits.yaml $(ARGS)

test: setup ## Run the tests of every unit, and one of each promise: three to four minutes on two slow cores
	@$(PYTEST) $(FAST) $(ARGS)

test-all: setup ## Run all tests, also whole runs that repeat others, and variations
	@$(PYTEST) $(ARGS)

test-daily: setup ## Run a ninth of what only `make test-all` runs, a different one each day; ARGS="--part 2/9": that one
	@$(BIN)/python -m tests.daily --jobs $(JOBS) $(ARGS)

lint: setup ## Check style, format and types
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet || { $(BIN)/ruff format --check; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/python -m benchmarks.summary --check

crash-test: setup ## Kill runs at many points, a hundred times as many as `make test`
	@$(BIN)/python -m tests.programs --number 200 --log .programs.txt
	@$(REPEATEDLY) -m crash $(ARGS)

# In an environment of its own, which stays: TORCH_VENV names another place for it.
TORCH_VENV ?= .venv-torch/$(TORCH)
$(TORCH_VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing torch $(TORCH) into $(TORCH_VENV): several minutes and gigabytes"
	@$(PYTHON) -m venv $(TORCH_VENV)
	@grep -vE '^(torch|triton|nvidia-|cuda-|sympy|setuptools)' constraints.txt > $(TORCH_VENV)/constraints.txt
	@$(TORCH_VENV)/bin/pip install --quiet --disable-pip-version-check -c $(TORCH_VENV)/constraints.txt \
	torch==$(TORCH) -e '.[dev]'
	@touch $@

test-torch: $(TORCH_VENV)/.installed ## Run the tests with another torch: make test-torch TORCH=2.11.0
	@PYTHONPATH=$(CURDIR) $(TORCH_VENV)/bin/pytest -q -n $(JOBS) --dist loadgroup -rs $(FAST) $(ARGS)

isa-test: setup ## Run the numeric tests as other CPUs would: every instruction set that can be limited
	@$(BIN)/python -m tests.isa --jobs $(JOBS) $(ARGS)

fuzz-test: setup ## Load damaged and hostile files, a hundred times as many as `make test`
	@$(REPEATEDLY) -m fuzz $(ARGS)

signal-test: setup ## Send signals in every phase to every process, many times
	@$(REPEATEDLY) -m signal $(ARGS)

mutants: setup ## Make small mistakes in a copy, one at a time: a test must catch each
	@$(BIN)/python -m tests.mutants --log .mutants.txt $(ARGS)

golden: setup ## Train all cases here and at BASE=COMMIT, killed ones too: is any tensor, row or answer different?
	@$(BIN)/python -m tests.golden --base $(or $(BASE),HEAD) $(ARGS)

soak: setup ## Train for 100,000 steps: memory, open files and threads must not grow
	@$(BIN)/python -m tests.faults.soak $(ARGS)

bench: setup ## Measure what docs/costs.md says, for other toolkits too; ARGS=--record: into the documentation
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[benchmarks]'
	@$(BIN)/python -m benchmarks $(ARGS)

gpu: setup ## Test and measure on a GPU; DATASET=FOLDER: CIFAR-10 from there; ARGS="--part exact": a part
	@$(BIN)/python -m benchmarks.gpu $(if $(DATASET),--dataset '$(DATASET)') $(ARGS)

docs: setup ## Build the documentation into site/, readable offline
	@NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --quiet && echo "open site/index.html"

# For every platform in one file, which pip and uv read. The platforms that all lines share go. The Python stays: no line
# is for a later one, which thus gets the versions that pip chooses.
PLATFORMS := sys_platform == 'darwin' or sys_platform == 'linux' or sys_platform == 'win32'
lock: setup ## Choose versions for constraints.txt, keeping what fits; ARGS=--upgrade: the newest
	@$(BIN)/pip install --quiet --disable-pip-version-check uv
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.10 --all-extras --no-header --no-annotate \
	pyproject.toml --output-file constraints.txt $(ARGS)
	@{ echo "# The exact versions that the tests run with: \`pip install -c constraints.txt -e '.[dev]'\`,"; \
	echo "# or \`uv pip install\` with the same arguments. Written by \`make lock\`."; \
	sed -E "/^#/d; s/ (;|and) \(?($(PLATFORMS))\)?$$//" constraints.txt; \
	} > .constraints.new && mv .constraints.new constraints.txt

clean: ## Remove .venv and all caches, but not runs/
	@rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	@find . -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help setup train test test-all test-daily lint crash-test isa-test test-torch fuzz-test signal-test mutants golden soak bench gpu docs lock clean
