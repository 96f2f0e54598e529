# make demo: the main job on a real long text with a real model. make test: everything that is checked.
# Both make their own Python environment first, once (build_scripts/environment.py).

PYTHON ?= python3
PYTEST_ARGS ?=
# Files of tests run side by side, each process on one core; a real model in float64 takes up to 10 GB of memory.
PYTEST_WORKERS ?= 2
export PYTHONPATH := $(CURDIR)

# Recursive on purpose: evaluated by the recipes that need an environment, and by no others.
ENV_PYTHON = $(or $(shell $(PYTHON) build_scripts/environment.py),$(error no Python environment))

.PHONY: demo test lint environment triton-environment clean

demo:
	@set -e; python="$(ENV_PYTHON)"; mkdir -p out; \
	$$python build_scripts/demo_prompt.py > out/demo_prompt.txt; \
	$$python -m bpkv_trt generate --model smollm2 --prompt-file out/demo_prompt.txt \
	  --question "What does the with statement do?" --budget 0.2 --verify --json out/demo.json

test: lint
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} "$(ENV_PYTHON)" -m pytest -n $(PYTEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

lint:
	@set -e; python="$(ENV_PYTHON)"; $$python -m ruff check .; $$python -m ruff format --check .; $$python -m mypy

environment:
	@echo "$(ENV_PYTHON)"

# The real Triton Inference Server, which tests/serving starts; they make it too, or are skipped where it cannot be had.
triton-environment:
	@$(PYTHON) build_scripts/triton_environment.py

clean:
	rm -rf out dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
