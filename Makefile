# Two commands set up everything they need: `make demo` and `make test`.
VENV ?= .venv
export VENV

.PHONY: demo test test-machine bench bench-plugin lint format corpus docs clean

demo: ## the whole way on a simulated node, touching nothing
	@scripts/make-venv
	@$(VENV)/bin/gpunode demo

test: ## linters, types, unit and integration tests with real engines
	@scripts/make-venv dev
	@scripts/install-engines
	@scripts/run-tests

test-machine: ## gpunode on booted Debian machines with systemd; needs root, apt and Linux namespaces
	@scripts/make-venv dev
	@scripts/install-engines
	@scripts/run-tests --machine

bench: ## start times of the commands, as ratios to `python -c pass`
	@scripts/make-venv dev
	@$(VENV)/bin/python -m scripts.bench

bench-plugin: ## the device plugin against its limits; BENCH='--peer COMMAND' measures another one beside it
	@scripts/make-venv dev
	@$(VENV)/bin/python -m scripts.bench_plugin $(BENCH)

lint: ## what `make test` checks first
	@scripts/make-venv dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format:
	@scripts/make-venv dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

corpus: ## record what configure-runtime does with every file of the corpus on the engines at hand
	@scripts/make-venv dev
	@scripts/install-engines
	PATH="$$PATH:/usr/sbin:/sbin" GPUNODE_RECORD_CORPUS=1 $(VENV)/bin/python -m pytest -q -k corpus tests/integration

docs: ## write the generated pages and the README's transcripts again
	@scripts/make-venv dev
	$(VENV)/bin/python scripts/generate_docs.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
