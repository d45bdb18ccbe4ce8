# Needs only Python 3.11 or newer and make; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A worker per core, each with one thread; one that has run out of tests takes some of the others'.
PYTEST := $(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 --dist worksteal
TESTS ?= tests/losses tests/heads

.PHONY: demo test check coverage lint types plot bench docs package report clean

demo: $(READY)  ## compare the losses on a small task: a table, and a picture of the learning curves
	$(BIN)/spherical-loss compare digits

test: lint types  ## lint, types, tests
	$(PYTEST)

check: lint types  ## what to run while editing, in less than a minute: lint, types, the quick tests of losses and heads, or of TESTS=...
	$(PYTEST) -m "not slow" $(TESTS)

coverage: $(READY)  ## the tests, and the lines of the library they do not reach: build/coverage/index.html
	$(PYTEST) --cov --cov-report=term --cov-report=html:build/coverage

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

plot: $(READY)  ## draw the losses and their gradients: docs/losses.svg
	$(BIN)/python -m spherical_loss.experiments.report.plot_losses docs/losses.svg

bench: $(READY)  ## measure losses and heads side by side with their peers
	$(BIN)/python -m benchmarks

docs: $(READY)  ## build the documentation: build/docs/index.html
	$(BIN)/sphinx-build -W --keep-going -q -E -d build/doctrees docs build/docs

package: $(READY)  ## build what goes to PyPI, and check it: dist/
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group package
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

report: $(READY)  ## turn results/ into a page, results/report.html, and the summary in the README
	$(BIN)/spherical-loss report --readme README.md

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Dependency groups (PEP 735) need pip 25.1 or newer; a new environment has the one Python came with.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all]' --group dev
	touch $(READY)
