# Everything here works on a plain Linux machine without a GPU. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
CONSTRAINTS ?= ci/constraints-cpu.txt
JUNIT ?= build/junit
EVENTS ?= build/events
# Where `make regressions` looks for cases that are new.
CASES ?= zero2-harness-cases .zero2-fuzz build/fuzz

ifdef NO_VENV
RUN := $(PYTHON) -m
READY :=
else
RUN := $(VENV)/bin/python -m
READY := $(VENV)/.ready
endif

.DEFAULT_GOAL := help
.PHONY: help setup verify fuzz museum guide gpus test-cpu test-gpu summary regressions stress train bench soak lint fmt clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 14
	@echo
	@echo "  PYTHON=python3.12 chooses the interpreter, NO_VENV=1 uses it as it is, without making $(VENV)."

setup: $(READY) ## make the virtual environment (.venv) with the exact pins of CONSTRAINTS (ci/constraints-cpu.txt)

# Remade whenever the pins or the project's own requirements change.
$(VENV)/.ready: $(CONSTRAINTS) pyproject.toml
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $(CONSTRAINTS)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

verify: $(READY) ## verify ZeroMaster: 300 scenarios over worlds 1, 2, 3, 4, bit for bit
	@mkdir -p $(EVENTS)
	$(RUN) harness verify --examples 300 --events $(EVENTS)/verify.jsonl $(VERIFY)

fuzz: $(READY) ## search for a violation for MINUTES (10), with as many processes as there are cores; goes on where it stopped
	@mkdir -p $(EVENTS)
	$(RUN) harness fuzz --minutes $(or $(MINUTES),10) --events $(EVENTS)/fuzz.jsonl $(FUZZ)

train: $(READY) ## train a small language model sharded and unsharded, side by side
	$(RUN) harness train --world 2 --steps 60

bench: $(READY) ## what a scenario costs, as a ratio to its own collectives and arithmetic run bare
	$(RUN) harness bench

soak: $(READY) ## the harness itself: 2,000 scenarios with a fault in every 20th, every verdict checked, nothing left behind
	$(RUN) harness soak

museum: $(READY) ## the bug museum: a campaign over each planted bug and each right variant, and the score
	@mkdir -p $(EVENTS)
	$(RUN) harness museum --events $(EVENTS)/museum.jsonl $(MUSEUM)

guide: $(READY) ## measure the tables of docs/strategies.md again: which strategy keeps which equality
	ci/guide "$(RUN)"

test-cpu: $(READY) ## lint and all tests that need no GPU
	ci/test-cpu "$(RUN)" $(JUNIT)

test-gpu: $(READY) ## tests on the GPUs of this machine: NCCL at every world they allow; the last line says what was not covered
	ci/test-gpu "$(RUN)" $(JUNIT)

stress: $(READY) ## damaged case files, campaigns at once, killed campaigns, all of what test-cpu tries a part of (an hour)
	$(RUN) pytest tests/stress -q -s
	HARNESS_KILL_ROUNDS=$${HARNESS_KILL_ROUNDS:-30} $(RUN) pytest tests/ranks/test_parent_killed.py -q -s
	FULL_TABLE=1 $(RUN) pytest tests/unit tests/negative tests/plugin tests/ranks tests/cli -q -s

gpus: $(READY) ## fail unless GPUS (1) GPUs can be used, and name them
	@$(RUN) ci.gpus $(or $(GPUS),1)

summary: $(READY) ## what the targets before it found, as Markdown: tests of build/junit, campaigns of build/events
	@$(RUN) ci.summary $(JUNIT) $(EVENTS)

regressions: $(READY) ## collect cases that are new as build/regressions.patch, which adds them to harness/regressions
	@$(RUN) ci.regressions build/regressions.patch $(CASES)

lint: $(READY) ## ruff, mypy --strict, import contracts, workflows and Dockerfiles
	ci/lint "$(RUN)"

fmt: $(READY) ## format the code
	$(RUN) ruff format zero2core harness tests ci
	$(RUN) ruff check --fix zero2core harness tests ci

clean: ## remove what the targets made
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis zero2-harness-cases
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
