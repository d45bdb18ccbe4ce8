# Needs only Python 3.11 or newer and make; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test coverage lint types plot bench docs package report clean

demo: $(READY)  ## compare the losses on a small task: a table, and a picture of the learning curves
	$(BIN)/spherical-loss compare digits

test: $(READY) lint types  ## lint, types, tests
	$(BIN)/python -m pytest

coverage: $(READY)  ## the tests, and the lines of the library they do not reach: build/coverage/index.html
	$(BIN)/python -m pytest --cov --cov-report=term --cov-report=html:build/coverage

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
