# `make serve` and `make test` are all a newcomer needs; both set up .venv first.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NODE := .node
# What `make serve` hands to `serve-llm serve`, for example ARGS="path/to/model --port 9000".
ARGS ?=

.PHONY: help serve test test-all test-foreign test-triton lint format clean
.DEFAULT_GOAL := help

help:  ## List the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

serve: $(VENV)/.installed  ## Serve the default model on http://127.0.0.1:8000 (more flags: ARGS="...").
	$(BIN)/serve-llm serve $(ARGS)

test: lint $(VENV)/.installed-test  ## Lint, type-check and run the test suite.
	$(BIN)/python -m pytest -m "not slow and not foreign"

test-all: lint $(VENV)/.installed-test  ## The same with the slow sweeps, and then test-foreign.
	$(BIN)/python -m pytest -m "not foreign"
	$(MAKE) test-foreign

test-foreign: $(VENV)/.installed-foreign $(NODE)/.installed  ## Others' clients, and requests generated from the OpenAPI document.
	$(BIN)/python -m pytest -m foreign tests/foreign

test-triton: $(VENV)/.installed-test  ## The kernels' tests with the Triton that the GPU image gets.
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --upgrade \
		--target $(VENV)/triton-of-image "$$(grep ^triton== docker/constraints.txt)"
	PYTHONPATH=$(VENV)/triton-of-image $(BIN)/python -m pytest -m "not slow" -k triton tests/kernels

lint: $(VENV)/.installed-test  ## Lint and type-check only.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test  ## Let ruff fix and format the code.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the virtual environment and caches.
	rm -rf $(VENV) $(NODE) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

# The stamps make pip run again only when the dependencies may have changed.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[test]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-foreign: $(VENV)/.installed-test
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[test,foreign]'
	touch $@

$(NODE)/.installed: tests/foreign/node/package.json tests/foreign/node/package-lock.json
	@if command -v node >/dev/null && command -v npm >/dev/null; then \
	  mkdir -p $(NODE) && cp $^ $(NODE)/ && \
	  npm ci --prefix $(NODE) --no-audit --no-fund && touch $@; \
	else echo "no node here: the JavaScript clients will be skipped"; fi
