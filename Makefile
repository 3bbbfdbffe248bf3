# Everything runs in .venv, which the first target that needs it sets up.

PYTHON ?= python3
VENV ?= .venv
# On a machine without a GPU this must be a CPU build; .ci/environment.py refuses another.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
PROMPT ?= Why is the sky blue? Answer in two sentences.
# Arguments for pytest: make test ARGS="tests/test_layers.py -k rotary"
ARGS ?=
WORKERS ?= auto

run = $(VENV)/bin/python

.PHONY: help demo test lint format build env gpu clean

help:
	@echo "make demo     sets up .venv, builds, and answers a prompt (PROMPT=\"...\")"
	@echo "make test     sets up .venv, builds, and runs every test (ARGS=\"...\" for pytest)"
	@echo "make lint     ruff, mypy, and whether results/ has become stale"
	@echo "make build    builds the native modules beside the Python files"
	@echo "make gpu      on a machine with an NVIDIA GPU: tests, comparison with the emulator, benchmarks"
	@echo "make clean    removes what was built; .venv stays"

env:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) was not found: install Python 3.10 to 3.13, or choose one with make PYTHON=..." >&2; exit 2; }
	@$(PYTHON) .ci/environment.py $(VENV) --torch "$(TORCH)" --index "$(TORCH_INDEX)" --extras engine,gpu,test

build: env
	@$(run) setup.py --quiet build_ext --inplace

demo: build
	$(run) -m engine generate --model smollm2 --chat --prompt "$(PROMPT)"

test: build
	$(run) -m pytest -n $(WORKERS) $(ARGS)

# With the Python that has PyTorch's CUDA build, and without .venv: the machine may have no network.
gpu:
	$(PYTHON) setup.py --quiet build_ext --inplace
	$(PYTHON) -m bench.gpu

lint: env
	$(run) -m ruff check .
	$(run) -m ruff format --check .
	$(run) -m mypy
	$(run) -m bench.report --check

format: env
	$(run) -m ruff format .
	$(run) -m ruff check --fix .

clean:
	rm -rf build dist *.egg-info .cache kernels/*.so
