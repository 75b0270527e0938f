# Two commands, nothing before them: `make demo` and `make test`. Each makes .venv and installs what is pinned.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_OUT ?= demo-out
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test lint clean help

help:
	@echo "make demo   analyze, plan, quantize, compare and bench the default model; ends with one table"
	@echo "make test   run the test suite"
	@echo "make lint   ruff and mypy --strict"
	@echo "make clean  remove .venv, build and demo output"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 12) else "qtool needs Python 3.11 or 3.12, and $(PYTHON) is %d.%d: run make PYTHON=python3.12 ..." % v)'
	$(PYTHON) -m venv $(VENV)
	# torch by itself first: asked for by its exact version, a machine with a CPU build at hand takes that one
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python tools/demo.py --out $(DEMO_OUT)

# files go to two processes, each with one thread: all that two cores can do
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

$(VENV)/.installed-dev: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test,dev]'
	@touch $@

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/link_tree.py
	cd build/tree && ../../$(BIN)/mypy -p qtool

clean:
	rm -rf $(VENV) build dist *.egg-info $(DEMO_OUT) .pytest_cache .mypy_cache .ruff_cache .hypothesis
