# Every target makes the environment it needs; a clean clone with Python 3.11+ is enough.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Named first and exactly: a bare `torch` would bring gigabytes of CUDA libraries.
TORCH  ?= torch==2.13.0

.PHONY: demo test lint fast bench soak clean

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dbn]" --group dev
	touch $@

$(VENV)/installed-bench: $(VENV)/installed
	$(BIN)/python -m pip install --quiet "$(TORCH)" --group bench
	touch $@
