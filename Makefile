# Every target makes the environment it needs; a clean clone with Python 3.11+ is enough.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Named first and exactly: a bare `torch` would bring gigabytes of CUDA libraries.
TORCH  ?= torch==2.13.0

.PHONY: demo test lint fast bench soak picture clean

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dbn,onnx]" --group dev
	touch $@

$(VENV)/installed-bench: $(VENV)/installed
	$(BIN)/python -m pip install --quiet "$(TORCH)" --group bench
	touch $@

# Trains a small model on synthetic bars in an emulated GPU that is too small for the batch asked for.
demo: $(VENV)/installed
	rm -rf demo-runs
	$(BIN)/foxray synth demo-runs/bars.parquet --days 10
	$(BIN)/foxray train --model tft --parquet-file demo-runs/bars.parquet --epochs 1 --batch-size 64 \
	    --hidden-dim 16 --window-stride 8 --emulate-gpu 160MiB --storage demo-runs --run-id demo

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# All of it: style, types, fast tests first, then those with real Ray clusters and processes.
test: lint
	$(BIN)/python -m pytest -m "not soak"

# What to run while working: under three minutes.
fast: lint
	$(BIN)/python -m pytest -m "not slow and not soak"

soak: $(VENV)/installed
	$(BIN)/python -m pytest -m soak

bench: $(VENV)/installed-bench
	$(BIN)/python -m benchmarks

# The README's picture, drawn from what the demo's run really printed.
picture: demo
	$(BIN)/python -m benchmarks.picture docs/images/show.svg $(BIN)/foxray show demo --storage demo-runs

clean:
	rm -rf $(VENV) demo-runs foxray-runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
