# `make demo` and `make test` work on a fresh machine with Python 3.11+ and make.
PYTHON ?= python3
STACKRL := .venv/bin/stackrl

.PHONY: help install sky smollm2 demo test schema lint

help:
	@echo "make demo      install what is missing and watch a model learn on two CPU cores (12 minutes)"
	@echo "make test      install what is missing and run the tests"
	@echo "make install   .venv with the runtime for CPUs"
	@echo "make sky       .venv-sky with SkyPilot, for clouds"
	@echo "make smollm2   an offline pretrained model for stacks/smollm2-swap-cpu.yaml"
	@echo "make schema    write the JSON Schema and docs/stack.md anew from the typed models"
	@echo "make lint      check the style"

install:
	@$(PYTHON) install.py .venv cpu dev

sky:
	@$(PYTHON) install.py .venv-sky sky

smollm2: install
	@$(PYTHON) install.py .venv smollm2

demo: install
	$(STACKRL) launch stacks/reverse-text-cpu.yaml

test: install sky
	STACKRL_TESTS_NEED_SKY=1 .venv/bin/python -m pytest $(TESTS)

schema: install
	$(STACKRL) schema > schemas/stack.schema.json.new
	mv schemas/stack.schema.json.new schemas/stack.schema.json
	$(STACKRL) schema -o markdown > docs/stack.md.new
	mv docs/stack.md.new docs/stack.md

lint: install
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
