# Needs only make and Python >= 3.11 on a bare machine; everything else is installed into $(VENV).
#   make test PYTHON=python3.13 VENV=.venv-313     another Python, in its own environment
#   make test-all PYTEST_ARGS="tests/layout -k padding"

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PYTEST_ARGS ?=
FUZZ_ARGS ?=
SEEDS ?= 0:100
STEPS ?=
EXPLICIT = tests/layout tests/create tests/train tests/decode tests/systems
TORTURED = tests/checkpoint/test_promises.py tests/checkpoint/test_histories.py
UPGRADES ?= JAX_REMAT3 JAX_CUSTOM_VJP3 JAX_CUSTOM_JVP3

SHELL := /bin/sh
bin = $(VENV)/bin
pytest = $(bin)/python -m pytest -n $(WORKERS) --dist worksteal

# The tests start hundreds of processes; each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test explicit test-all quick guides site package release store lint format types bench torture soak fuzz seams upgrades nightly setup setup-lint setup-site setup-package setup-store clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: setup  ## the main job: plan, train, save, restore on other meshes, compare (2 minutes)
	@$(bin)/python tools/demo.py

test: setup  ## one case of each test that is quick, the whole path, two processes, three guides (five minutes)
	@$(pytest) --first $(PYTEST_ARGS)

explicit: setup  ## tests of layouts and training, one case of each, on meshes with Explicit axes (two minutes)
	@$(pytest) --first --explicit $(EXPLICIT) $(PYTEST_ARGS)

test-all: setup  ## every test and every guide (an hour)
	@$(pytest) $(PYTEST_ARGS)

quick: setup  ## layout, data, and the whole path once (under 3 minutes)
	@$(pytest) -m "not slow" tests/layout tests/hosts tests/test_layering.py tests/test_public_surface.py tests/test_whole_path.py $(PYTEST_ARGS)

guides: setup  ## runs README.md and guides/*.md from top to bottom
	@$(pytest) tests/guides $(PYTEST_ARGS)

site: setup-site  ## the site, build/site/guides/index.html, from the guides and the docstrings; warnings are errors
	@rm -rf build/site build/site-doctrees  # pages that were renamed would stay
	@$(bin)/python -m sphinx -q -W --keep-going -c guides -d build/site-doctrees . build/site
	@$(bin)/python -m pytest -q tests/guides/test_site.py
	@echo "build/site/guides/index.html"

package: setup-package  ## builds the wheel and sdist, checks them, and tries them in empty environments; publishes nothing
	@$(bin)/python tools/package.py

release: setup-package  ## checks VERSION=..., builds and tries it as `make package`; stops before the upload
	@$(bin)/python tools/release.py $(VERSION)

store: setup-store  ## checkpoints on an emulated object store: its tests, and their time at 40 ms a request
	@$(bin)/python -m pytest tests/checkpoint/test_emulated_store.py $(PYTEST_ARGS)
	@$(bin)/python -m benchmarks.object_store

lint: setup-lint  ## ruff: rules and format
	@$(bin)/ruff check .
	@$(bin)/ruff format --check .

format: setup-lint  ## rewrites the sources in the house format
	@$(bin)/ruff check --fix .
	@$(bin)/ruff format .

types: setup-lint  ## pyright, strict
	@$(bin)/pyright --pythonpath $(bin)/python

bench: setup  ## every benchmark; results go to benchmarks/results
	@$(bin)/python -m benchmarks

torture: setup  ## kills training runs for a long time and checks what their checkpoints hold
	@$(bin)/python -m searches.torture
	@RANDOM_TREES=300 RANDOM_HISTORIES=300 $(bin)/python -m pytest -q --timeout=0 $(TORTURED)

soak: setup  ## disturbs a supervised run (kills, disks, data, a second job) and compares its losses (10 minutes)
	@$(bin)/python -m searches.soak

fuzz: setup  ## searches for programs that a step gets wrong: random models under random layouts (15 minutes)
	@$(bin)/python -m searches.fuzz --minutes 15 --workers $(WORKERS) $(FUZZ_ARGS)

seams: setup  ## tries generated combinations of features, options and meshes against one device (15 minutes)
	@$(bin)/python -m searches.seams --seeds $(SEEDS)

upgrades: setup  ## `make test` with each flag that JAX plans to turn on, and on pre-releases (five minutes each)
	@failed=; for flag in $(UPGRADES); do \
	  echo "== $$flag=1"; \
	  env $$flag=1 $(pytest) -q --first $(PYTEST_ARGS) || failed="$$failed $$flag"; \
	done; \
	$(bin)/python tools/prereleases.py $(PYTHON) $(VENV)-pre -n $(WORKERS) --dist worksteal -q --first $(PYTEST_ARGS) \
	  || failed="$$failed pre-releases"; \
	test -z "$$failed" || { echo "tests fail with$$failed" >&2; exit 1; }

nightly:  ## every test and guide on each Python here, then the long searches (4 hours); STEPS="test-all fuzz": some
	@.ci/run --nightly $(STEPS)

clean:  ## deletes $(VENV) and caches
	rm -rf $(VENV) $(VENV)-pre build dist *.egg-info .pytest_cache .ruff_cache .hypothesis "$${XDG_CACHE_HOME:-$$HOME/.cache}/nnx_parallel-tests"

setup:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found. Fix: make <target> PYTHON=/path/to/python3.11 (or newer)" >&2; exit 1; }
	@$(PYTHON) tools/setup_venv.py $(VENV) test

setup-lint:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found. Fix: make <target> PYTHON=/path/to/python3.11 (or newer)" >&2; exit 1; }
	@$(PYTHON) tools/setup_venv.py $(VENV) test lint

setup-store:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found. Fix: make store PYTHON=/path/to/python3.13" >&2; exit 1; }
	@$(PYTHON) tools/setup_venv.py $(VENV) test store

setup-package:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found. Fix: make package PYTHON=/path/to/python3.13" >&2; exit 1; }
	@$(PYTHON) tools/setup_venv.py $(VENV) test package

setup-site:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found. Fix: make site PYTHON=/path/to/python3.13" >&2; exit 1; }
	@$(PYTHON) tools/setup_venv.py $(VENV) test site
