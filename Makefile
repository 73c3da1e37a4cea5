# Two commands set up everything they need: `make demo` and `make test`.
VENV ?= .venv
export VENV
DOCKER ?= docker
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' gpunode/__init__.py)
BUNDLE := gpunode-$(VERSION)-linux-x86_64

.PHONY: demo test test-all bench bench-plugin lint format corpus docs screenshots constraints dist bundle image clean help

demo: ## run the whole program on a simulated node; changes nothing on this machine
	@scripts/make-venv
	@$(VENV)/bin/gpunode demo

test: ## linters, types, unit tests, and each engine once
	@scripts/make-venv dev
	@scripts/install-engines
	@scripts/run-tests

test-all: test ## then all releases, corpora, long property tests, and booted Debian machines (needs root and apt)
	@scripts/run-tests --full

bench: ## measure the start times of commands, as ratios to `python -c pass`
	@scripts/make-venv dev
	@$(VENV)/bin/python -m scripts.bench

bench-plugin: ## measure the device plugin against its limits; BENCH='--peer COMMAND' compares another plugin
	@scripts/make-venv dev
	@$(VENV)/bin/python -m scripts.bench_plugin $(BENCH)

lint: ## ruff and mypy, as `make test` runs them first
	@scripts/make-venv dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: ## fix what ruff can fix, and format the code
	@scripts/make-venv dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

corpus: ## record what configure-runtime does with each file of the corpus on the installed engines
	@scripts/make-venv dev
	@scripts/install-engines
	PATH="$$PATH:/usr/sbin:/sbin" GPUNODE_RECORD_CORPUS=1 $(VENV)/bin/python -m pytest -q -k corpus tests/integration

docs: ## write the generated pages and the transcripts of docs/
	@scripts/make-venv dev
	$(VENV)/bin/python scripts/generate_docs.py

screenshots: ## make the pictures of docs/images again (needs Chromium)
	@scripts/make-venv dev
	$(VENV)/bin/python scripts/take_screenshots.py

constraints: ## update constraints.txt to the newest releases that pyproject.toml allows (needs uv)
	@head -2 constraints.txt >constraints.new
	@uv pip compile --quiet --universal --python-version 3.10 --upgrade --all-extras --no-annotate --no-header \
		pyproject.toml >>constraints.new
	@mv constraints.new constraints.txt

dist: ## build wheel, sdist, deb, rpm, offline bundle and Ansible collection in dist/
	@scripts/make-venv dev
	$(VENV)/bin/python scripts/build_packages.py

bundle: ## build the offline bundle in dist/
	@scripts/make-venv dev
	$(VENV)/bin/python scripts/build_packages.py bundle

image: bundle ## build the container image gpunode:VERSION from the bundle; DOCKER=podman, BUILD='--build-arg BASE=IMAGE'
	tar -C dist -xzf dist/$(BUNDLE).tar.gz
	$(DOCKER) build --tag gpunode:$(VERSION) $(BUILD) dist/$(BUNDLE)
	rm -r dist/$(BUNDLE)

clean: ## remove the virtual environment, build output and caches
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-13s %s\n", $$1, $$2 }'
