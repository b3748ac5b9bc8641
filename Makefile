# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test suite test-all check types docs lint imports budget format clean

setup: .venv/.ready

# PIP_ARGS: further arguments of pip install; uv is there for PyTorch's CPU build, and pip does without it
.venv/.demo: EXTRAS := vision,data
.venv/.ready: EXTRAS := dev
.venv/.demo .venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	-$(BIN)/python -m pip install --quiet --only-binary uv --constraint constraints.txt uv
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python src/penstock/cluster/install.py $(CURDIR)/.venv \
		--constraint constraints.txt $(PIP_ARGS) --editable '.[$(EXTRAS)]'
	touch .venv/.demo $@

demo: .venv/.demo
	$(BIN)/penstock demo

CHECKS := types docs lint imports budget
TESTS := $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

# beside the tests, whose processes often wait
test: setup
	$(MAKE) --no-print-directory --jobs 2 suite $(CHECKS)

suite: setup
	$(TESTS) -m "not long" --ignore tests/test_budget.py

# what takes long and guards what rarely changes, and all examples of properties (see tests/conftest.py and
# tests/fewer.py); .ci/run runs both
test-all: setup
	TESTS_FULL=1 $(TESTS) -m long

# side by side, since each of them uses one core
check: setup
	$(MAKE) --no-print-directory --jobs 2 --output-sync $(CHECKS)

types: setup
	$(BIN)/mypy

docs: setup
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -c docs . build/docs

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

imports: setup
	$(BIN)/lint-imports

budget: setup
	$(BIN)/python -m pytest --quiet tests/test_budget.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
