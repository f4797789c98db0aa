.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv test test-slow test-lm-eval quickstart quickstart-text bench bench-generation bench-ladder bench-gpu demo readme-demo mechanism wheel check-wheel constraints format clean

PYTHON ?= python3
BIN := .venv/bin
# -qq leaves only errors.
PIP_FLAGS := -qq -c constraints.txt
CORE := .venv/.ready-core
READY := .venv/.ready
READY_BENCH := .venv/.ready-bench
READY_EVAL := .venv/.ready-eval

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

venv: $(READY)  ## .venv with everything that the tests need

$(CORE): pyproject.toml constraints.txt
	@echo "setting up .venv"
	@$(PYTHON) -m venv .venv
	@# The build backend first: without build isolation it too follows constraints.txt.
	@$(BIN)/pip install $(PIP_FLAGS) editables hatchling
	@$(BIN)/pip install $(PIP_FLAGS) --no-build-isolation -e .
	@touch $@

$(READY): $(CORE)
	@echo "adding what the tests need"
	@$(BIN)/pip install $(PIP_FLAGS) --no-build-isolation -e '.[dev,oracle,hf]'
	@touch $@

$(READY_BENCH): $(READY)
	@echo "adding the bench extra"
	@$(BIN)/pip install $(PIP_FLAGS) --no-build-isolation -e '.[bench]'
	@touch $@

$(READY_EVAL): $(READY)
	@echo "adding the eval extra, 600 MB"
	@$(BIN)/pip install $(PIP_FLAGS) --no-build-isolation -e '.[eval]'
	@touch $@

test: $(READY)  ## lint, types and the fast tests
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/basedpyright
	@# One torch thread for each of the two workers.
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 -m "not slow"

test-slow: $(READY)  ## the tests that take minutes to hours
	@$(BIN)/pytest -m slow

test-lm-eval: $(READY_EVAL)  ## the adapter beside lm-eval's own, end to end
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q tests/test_harness.py

quickstart: $(CORE)  ## train a small Atlas on recall, about 3 minutes on 2 cores, and its report
	@$(BIN)/atlas-lm train quickstart --out runs/quickstart --resume

quickstart-text: $(CORE)  ## Atlas, Titans and a transformer on the texts that every Python carries
	@$(BIN)/atlas-lm train python_text --out runs/python-atlas --resume
	@$(BIN)/atlas-lm train python_text --model.rule titans --out runs/python-titans --resume
	@$(BIN)/atlas-lm train python_text --model.rule attention --out runs/python-attention --resume
	@$(BIN)/atlas-lm report runs/python-atlas runs/python-titans runs/python-attention --out runs/python.html

bench: $(READY_BENCH)  ## run the CPU benchmarks
	@$(BIN)/python -m benchmarks.cpu

bench-generation: $(READY)  ## cost of a token after 1,000 and 100,000; a book read into a memory
	@$(BIN)/python -m benchmarks.generation

bench-ladder: $(READY)  ## titans from the loop to the kernels, every rung in one run
	@$(BIN)/python -m benchmarks.ladder

bench-gpu: $(READY_BENCH)  ## layers beside targets and peers on a CUDA GPU, and their figure
	@$(BIN)/python -m benchmarks.speed --lengths
	@$(BIN)/python -m benchmarks.figures results/speed.json

demo: $(CORE)  ## facts hidden in Python's manual, answered from a memory file, in a minute
	@$(BIN)/atlas-lm demo

readme-demo: $(CORE)  ## the same, as the README's opening
	@$(BIN)/python -m benchmarks.readme_demo

mechanism: $(READY)  ## what memories hold, lose and cost: results/mechanism, 20 minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m atlas_lm.eval.mechanism

wheel: $(READY)  ## build the wheel into dist/
	@rm -rf dist
	@$(BIN)/python -m build --wheel --no-isolation

check-wheel: wheel  ## install the wheel elsewhere, run the README's first example and the demo with it
	@set -eu; repo=$$PWD; tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	awk '/^```python/ {inside = 1; next} /^```/ && inside {exit} inside' README.md > "$$tmp/example.py"; \
	test -s "$$tmp/example.py" || { echo "README.md has no python example" >&2; exit 1; }; \
	$(PYTHON) -m venv "$$tmp/venv"; \
	"$$tmp/venv/bin/pip" install $(PIP_FLAGS) dist/*.whl; \
	cd "$$tmp"; ./venv/bin/python example.py; \
	echo "the README's first example runs from the wheel"; \
	begun=$$(date +%s); ./venv/bin/atlas-lm demo --html demo.html; test -s demo.html; \
	echo "the demo runs from the wheel, in $$(($$(date +%s) - begun)) s"

constraints:  ## pin the newest versions anew (torch stays: change its pin by hand first)
	@set -eu; tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	grep '^torch==' constraints.txt > "$$tmp/torch.txt"; \
	$(PYTHON) -m venv "$$tmp/venv"; \
	pip="$$tmp/venv/bin/pip"; \
	"$$pip" install -qq -c "$$tmp/torch.txt" editables hatchling; \
	"$$pip" install -qq -c "$$tmp/torch.txt" --no-build-isolation -e '.[dev,oracle,hf,bench,eval]'; \
	{ sed -n '/^#/p' constraints.txt; \
	  "$$pip" freeze --all --exclude pip --exclude atlas-lm | sed 's/+.*//'; } > "$$tmp/new.txt"; \
	cp "$$tmp/new.txt" constraints.txt

format: $(READY)  ## format, and fix what ruff can fix
	@$(BIN)/ruff check --fix --quiet
	@$(BIN)/ruff format --quiet

clean:  ## remove .venv and everything built
	@rm -rf .venv dist build .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
