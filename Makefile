# Two commands do all the set-up, from a clean clone with only Python (>= 3.11) and make:
#   make demo    five algorithms race on real data
#   make test    lint, types, imports, the whole fast suite
PYTHON ?= python3
BIN := .venv/bin
# One thread per process: the models under test are small, and pytest runs two processes.
export OMP_NUM_THREADS = 1

.PHONY: demo test test-slow bench docs lint clean

demo: .venv/installed
	OMP_NUM_THREADS= $(BIN)/afield run

test: lint
	$(BIN)/python -m pytest -m "not slow and not gpu" -n 2 --durations=5

test-slow: .venv/dev
	$(BIN)/python -m pytest -m "slow and not gpu"

# Figures for docs/performance.md; QUICK=--quick for a first look. peers.py makes its own throw-away environment.
bench: .venv/dev
	for name in fold events table journal snapshots training report peers service flower on_ray scale; do OMP_NUM_THREADS= $(BIN)/python benchmarks/$$name.py $(QUICK) || exit 1; done

# The documentation site, in build/site: open index.html there (search needs a server: mkdocs serve).
docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/dev: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
