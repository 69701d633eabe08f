.PHONY: setup demo test check bench soak format docs

PYTHON := .venv/bin/python
# Two workers are enough for two cores; the slowest files are spread by their tests.
PYTEST := $(PYTHON) -m pytest -n 2 --dist worksteal

setup:
	@scripts/setup

demo: setup
	.venv/bin/turnkeeper demo

test: setup
	$(PYTEST) -m "not soak"

check: setup
	.venv/bin/ruff format --check src tests bench examples
	.venv/bin/ruff check src tests bench examples
	.venv/bin/basedpyright
	.venv/bin/lint-imports
	$(PYTEST) -m "not soak"

format: setup
	.venv/bin/ruff format src tests bench examples
	.venv/bin/ruff check --fix src tests bench examples

bench: setup
	$(PYTHON) -m bench

soak: setup
	$(PYTHON) -m pytest -m soak

docs: setup
	$(PYTHON) -m pip install --quiet --group docs
	.venv/bin/zensical build --strict
