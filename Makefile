# Needs Python 3.10 or newer with venv, and nothing else: each target makes .venv when it is not there.
PYTHON ?= python3
RUN := .venv/bin/python
DEMO := runs/demo

.PHONY: demo test test-slow lint format clean help

help:
	@echo "make demo       train both backbones on the embedded images, sample, evaluate, report"
	@echo "make test       the test suite; make test-slow adds the long checks"
	@echo "make lint       ruff and mypy; make format rewrites"
	@echo "make clean      remove the environment and the caches, not your runs"

.venv/bin/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), "sitvit needs Python 3.10 or newer"'
	$(PYTHON) -m venv .venv

# Stamps: installed once, and again when pyproject.toml changes.
.venv/.installed: pyproject.toml | .venv/bin/python
	$(RUN) -m pip install --quiet -e .
	@touch $@

.venv/.installed-dev: pyproject.toml | .venv/bin/python
	$(RUN) -m pip install --quiet -e ".[dev]"
	@touch .venv/.installed $@

# The main tasks with the README's own commands. Each continues what was interrupted.
demo: .venv/.installed
	$(RUN) scripts/encode_latents.py --images fashion-mnist --out $(DEMO)/latents
	$(RUN) scripts/evaluate.py --samples $(DEMO)/latents
	$(RUN) scripts/train_sit.py --config configs/demo_sit.yaml
	$(RUN) scripts/train_sit.py --config configs/demo_sit_vit5.yaml
	for run in sit sit_vit5; do \
	  $(RUN) scripts/sample.py --checkpoint $(DEMO)/$$run --num-images 2000 --batch-size 100 --num-steps 10 \
	    --out $(DEMO)/$$run/samples/unguided || exit; \
	  $(RUN) scripts/evaluate.py --samples $(DEMO)/$$run/samples/unguided || exit; \
	  $(RUN) scripts/sample.py --checkpoint $(DEMO)/$$run --num-images 100 --batch-size 100 --num-steps 20 \
	    --cfg-scale 2 --out $(DEMO)/$$run/samples/guided || exit; \
	done
	$(RUN) scripts/report.py $(DEMO)/sit $(DEMO)/sit_vit5 --out $(DEMO)/report.html --figures samples/demo_

test: .venv/.installed-dev
	$(RUN) -m pytest

test-slow: .venv/.installed-dev
	$(RUN) -m pytest -m slow

lint: .venv/.installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: .venv/.installed-dev
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
