# make demo       install, export a shipped model, stream text from it (FAMILY=qwen4_exp)
# make test       install the test tools and run every test
# make test-fast  rungs r0 to r2: torch is not imported
# make fuzz N=2000  random programs of sequence edits against cold runs; log in docs/fuzz/
# make check      format, lint, types, import direction, size budget
PYTHON ?= python3
# Named alone and first, so that pip takes the build that its index prefers for this machine.
TORCH ?= torch==2.13.0
N ?= 2000
SEED ?= 0
PROMPT ?= def read(self, size=-1):

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
FAMILY ?= deepseek_v4
DEMO := out/$(FAMILY)_tiny
# The two onnxruntime wheels overwrite each other: exactly one of them is installed.
DEVICE := $(shell if nvidia-smi -L >/dev/null 2>&1 || test -e /proc/driver/nvidia/version; \
	then echo cuda; else echo cpu; fi)

.PHONY: demo test test-fast fuzz check format clean

demo: $(VENV)/demo.stamp
	rm -rf $(DEMO)
	$(BIN)/cachegraph export tiny:$(FAMILY) $(DEMO) --dialect ort
	$(BIN)/cachegraph generate $(DEMO) --prompt '$(PROMPT)' --max-tokens 200 \
		--temperature 0.6 --repetition-penalty 1.1 --seed 2

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest

test-fast: $(VENV)/test.stamp
	$(BIN)/python -m pytest --no-torch -m 'r0 or r1 or r2'

fuzz: $(VENV)/test.stamp
	PYTHONPATH=tests $(BIN)/python tests/fuzz/run.py --programs $(N) --seed $(SEED) \
		--log docs/fuzz/sequences.txt

check: $(VENV)/test.stamp .ns/cachegraph
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p cachegraph.models -p cachegraph.graphgen -p cachegraph.runtime \
		-p cachegraph.tools
	$(BIN)/python tools/dev/imports.py
	$(BIN)/python tools/dev/sizes.py

format: $(VENV)/test.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .ns $(DEMO)

# mypy does not follow package-dir; through this link it sees the folders as cachegraph.*.
.ns/cachegraph:
	mkdir -p .ns
	ln -s .. $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
		"cachegraph needs Python 3.11 or newer; $(PYTHON) is older or missing:" \
		"run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp is newer than pyproject.toml when what it lists is installed: a second run does nothing.
$(VENV)/demo.stamp: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[export,$(DEVICE)]'
	touch $@

$(VENV)/test.stamp: pyproject.toml $(VENV)/demo.stamp
	$(PIP) '$(TORCH)'
	$(PIP) -e '.[export,$(DEVICE),test]'
	touch $@
