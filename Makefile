# Every target sets up what it needs: a virtual environment with the project and its pinned torch.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup run test test-gpu lab lint record benchmarks browser clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV): about two minutes and 3 GB the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python scripts/lab_defaults.py
	touch $@

browser:
	@command -v chromium >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } || \
	  echo "no chromium: browser tests are skipped and thumbnails are left out"

run: setup browser
	$(BIN)/workbench run --out out/run $(ARGS)

# Two test processes on two cores: more threads would only wait for each other.
test: export OMP_NUM_THREADS = 1
test: lint browser
	$(BIN)/workbench record check
	$(BIN)/python -m pytest -n 2 --dist loadgroup -q -m "not gpu and not browser" $(ARGS)
	$(BIN)/python -m pytest -q -m browser $(ARGS)

test-gpu: setup
	$(BIN)/python -m pytest -q -m gpu $(ARGS)

lab: setup
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) --ServerApp.ip=127.0.0.1 --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks/tools/your_trace.ipynb $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# make record SLUG=op_dispatch: refuses while the tests that the experiment names are red
record: setup
	@test -n "$(SLUG)" || { echo "usage: make record SLUG=<experiment>"; exit 2; }
	$(BIN)/workbench record run $(SLUG) $(ARGS)

benchmarks: setup
	$(BIN)/python benchmarks/redraw.py
	$(BIN)/python benchmarks/traces_vs_hta.py $(ARGS)

clean:
	rm -rf out dist build .pytest_cache .ruff_cache .hypothesis
