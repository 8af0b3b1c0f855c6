# Everything here works on a plain Linux machine without a GPU. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
CONSTRAINTS := ci/constraints-cpu.txt
JUNIT ?= build/junit

ifdef NO_VENV
RUN := $(PYTHON) -m
READY :=
else
RUN := $(VENV)/bin/python -m
READY := $(VENV)/.ready
endif

.DEFAULT_GOAL := help
.PHONY: help setup verify fuzz museum guide test-cpu stress train bench soak lint fmt clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 14
	@echo
	@echo "  PYTHON=python3.12 chooses the interpreter, NO_VENV=1 uses it as it is, without making $(VENV)."

setup: $(READY) ## make the virtual environment (.venv) with the exact pins of ci/constraints-cpu.txt

# Remade whenever the pins or the project's own requirements change.
$(VENV)/.ready: $(CONSTRAINTS) pyproject.toml
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $(CONSTRAINTS)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

verify: $(READY) ## verify ZeroMaster: 300 scenarios over worlds 1, 2, 3, 4, bit for bit
	$(RUN) harness verify --examples 300

fuzz: $(READY) ## search for a violation for MINUTES (10), with as many processes as there are cores; goes on where it stopped
	$(RUN) harness fuzz --minutes $(or $(MINUTES),10) $(FUZZ)

train: $(READY) ## train a small language model sharded and unsharded, side by side
	$(RUN) harness train --world 2 --steps 60

bench: $(READY) ## what a scenario costs, as a ratio to its own collectives and arithmetic run bare
	$(RUN) harness bench

soak: $(READY) ## the harness itself: 2,000 scenarios with a fault in every 20th, every verdict checked, nothing left behind
	$(RUN) harness soak

museum: $(READY) ## the bug museum: a campaign over each planted bug and each right variant, and the score
	$(RUN) harness museum $(MUSEUM)

guide: $(READY) ## measure the tables of docs/strategies.md again: which strategy keeps which equality
	ci/guide "$(RUN)"

test-cpu: $(READY) ## lint and all tests that need no GPU
	ci/test-cpu "$(RUN)" $(JUNIT)

stress: $(READY) ## damaged case files, campaigns at once, killed campaigns, all of what test-cpu tries a part of (an hour)
	$(RUN) pytest tests/stress -q -s
	HARNESS_KILL_ROUNDS=$${HARNESS_KILL_ROUNDS:-30} $(RUN) pytest tests/ranks/test_parent_killed.py -q -s
	FULL_TABLE=1 $(RUN) pytest tests/unit tests/negative tests/ranks tests/cli -q -s

lint: $(READY) ## ruff, mypy --strict, import contracts
	ci/lint "$(RUN)"

fmt: $(READY) ## format the code
	$(RUN) ruff format zero2core harness tests
	$(RUN) ruff check --fix zero2core harness tests

clean: ## remove what the targets made
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis zero2-harness-cases
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
