# Everything happens in .venv, made on first use: `make demo` and `make test` need nothing but python3.11.
PYTHON ?= python3.11
PY := $(shell command -v $(PYTHON) || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

unexport PYTHONDONTWRITEBYTECODE  # the tests start many processes: without a cache each one compiles fedual anew

.PHONY: demo test test-all deployment lint docs bench clean

demo: .venv/.demo  ## train a posterior on ten clients with scikit-learn's digits: no download, under a minute
	$(BIN)/fedual run

test: .venv/.dev  ## lint, types, docs, one deployment on Flower, the quick tests: under 5 minutes on two cores
	$(MAKE) --no-print-directory -j 2 lint docs deployment
	$(BIN)/python -m pytest -n 2

test-all: .venv/.dev lint  ## types of the tests, too, slow tests, and all those with real Flower processes on 127.0.0.1
	$(BIN)/pyright
	$(BIN)/python -m pytest -n 2 -m "not flower"
	$(BIN)/python -m pytest -m flower

deployment: .venv/.dev  # spends most of its time waiting
	$(BIN)/python -m pytest -m brief tests/flower

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright src studies

docs: .venv/.dev  ## the documentation site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: .venv/.bench  ## speed against a plain loop and against Flower, as ratios in one run
	$(BIN)/python -m bench

clean:
	rm -rf .venv site out runs build

.venv/bin/python:
	$(PY) -m venv .venv

# pip refuses hashes and extras in constraints
.venv/constraints.txt: .venv/bin/python requirements.lock
	sed '/^ /d; /\[/d; s/ *\\$$//' requirements.lock > $@

.venv/.demo: .venv/constraints.txt pyproject.toml
	$(PIP) --constraint $< --editable '.[cli,data,glm]'
	touch $@

.venv/.dev: .venv/constraints.txt pyproject.toml
	$(PIP) --constraint $< --editable '.[dev]' ivon-opt  # GPL: an oracle of tests and benchmarks alone
	touch $@

.venv/.bench: .venv/.dev
	$(PIP) --constraint .venv/constraints.txt --editable '.[bench]'
	touch $@
