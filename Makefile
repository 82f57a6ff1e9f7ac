# Two commands: `make demo` trains and evaluates, `make test` tests; each sets itself up first.
VENV ?= .venv
OLDEST = .venv-oldest
PYTHON ?= python3
ARGS ?=
JOBS ?= 2

# CPU wheels for development. pip passes over an index it cannot reach; CUDA=1 leaves it out and takes
# PyPI's build. The package itself only asks for torch, whichever build is there.
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_SOURCE = $(if $(CUDA),,--extra-index-url $(CPU_INDEX) --retries 0 --timeout 20)

PY = $(VENV)/bin/python
PIP = $(PY) -m pip --disable-pip-version-check -q
# Idle threads that spin starve the busy ones on small machines.
export OMP_WAIT_POLICY = PASSIVE

.PHONY: help demo bench bench-peers bench-calculated bench-gpu compatibility figures test test-oldest fuzz mutate
.PHONY: site serve site-zensical test-site lint wheel clean
help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

demo: $(VENV)/.demo  ## train a sparse retriever on your Python's documentation (ARGS="--help")
	$(PY) -m examples.demo $(ARGS)

bench: $(VENV)/.demo  ## every loss beside its plain formula (ARGS="--suite full --only nws")
	$(PY) -m benchmarks $(ARGS)

bench-peers: $(VENV)/.demo  ## install the packages that the benchmarks compare with
	$(PIP) install -c constraints.txt --group bench

bench-calculated: $(VENV)/.dev  ## launches, bytes and times on a GPU, counted on meta tensors
	$(PY) -m benchmarks.studies.calculated $(ARGS)

bench-gpu: $(VENV)/.dev  ## all that a GPU is asked for, 15 minutes: make CUDA=1 bench-gpu (ARGS="losses")
	PYTHON=$(PY) benchmarks/gpu.sh $(ARGS)

# In the order of the files: by the number of tests, files of few but long tests would come last.
test: $(VENV)/.dev  ## all tests on the CPU (ARGS="-k info_nce")
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

fuzz: $(VENV)/.dev  ## the property tests with more, and more extreme, random problems
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile --hypothesis-profile fuzz tests/losses $(ARGS)

# Without other people's trainers.
OF_THE_PACKAGE = tests/_core tests/distributed tests/fast tests/losses tests/objective tests/representation \
  tests/sparsity tests/vocabulary tests/test_metrics.py tests/test_presets.py tests/test_queue.py
test-oldest: $(OLDEST)/.ready  ## the package on the oldest PyTorch that it takes, in an environment of its own
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n $(JOBS) --dist loadfile \
	  $(OF_THE_PACKAGE) $(ARGS)

mutate: $(VENV)/.mutate  ## does a test fail where a line is wrong? (ARGS="sparse_losses.losses.flops*")
	OMP_NUM_THREADS=1 CI=1 $(PY) -m tools.mutate $(ARGS)

compatibility: $(VENV)/.dev  ## what works with what: run those tests, write the table of docs/compatibility.md
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile tests -m works_with \
	  --compatibility docs/results/compatibility.json
	$(PY) -m tools.tables

figures: $(VENV)/.docs  ## pictures and tables of the docs anew, from the committed results
	$(PY) -m tools.figures $(ARGS)
	$(PY) -m tools.front
	$(PY) -m tools.tables

# Drawn with the package and from committed results, hence again when one of these has changed.
FIGURES = docs/figures/.drawn
$(FIGURES): $(VENV)/.docs $(wildcard tools/*.py tools/figures/*.py docs/results/* benchmarks/results/*.csv)
$(FIGURES): $(shell find sparse_losses -name '*.py')
	rm -rf $(@D)
	$(PY) -m tools.figures
	$(PY) -m tools.tables
	touch $@

site: $(FIGURES)  ## build the docs site into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	$(PY) -m tools.llms build/site

serve: $(FIGURES)  ## the docs site on this machine, built anew at every change
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs serve

site-zensical: $(FIGURES)  ## the same site by Zensical, into build/zensical
	sed 's#^site_dir:.*#site_dir: build/zensical#' mkdocs.yml > .zensical.yml
	$(VENV)/bin/zensical build --clean --strict --config-file .zensical.yml
	rm .zensical.yml
	$(PY) -m tools.llms build/zensical

test-site: site  ## every page of the site in a browser: needs Chromium (CHROMIUM=/path/to/it)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) tests/browser --site build/site $(ARGS)

lint: $(VENV)/.dev  ## formatting, lint and types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

wheel: $(VENV)/.dev  ## build the wheel and use it away from the sources
	rm -rf build/wheel && $(PY) -m build -q --outdir build/wheel .
	$(PY) -m twine check --strict build/wheel/*
	$(PIP) install --no-deps --target build/wheel/site build/wheel/*.whl
	cd build/wheel && PYTHONPATH=site $(abspath $(PY)) $(abspath tools/check_wheel.py)

clean:  ## remove the environment and everything built
	rm -rf $(VENV) $(OLDEST) build dist mutants docs/figures .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "sparse-losses needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt pip
	$(PIP) install $(TORCH_SOURCE) --no-deps -c constraints.txt torch
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) install -c constraints.txt -e . --group demo
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) install -c constraints.txt --group dev
	touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(PIP) install -c constraints.txt --group docs
	touch $@

$(VENV)/.mutate: $(VENV)/.dev
	$(PIP) install -c constraints.txt --group mutate
	touch $@

$(OLDEST)/.ready: VENV = $(OLDEST)
$(OLDEST)/.ready: constraints-oldest.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints-oldest.txt pip
	$(PIP) install $(TORCH_SOURCE) --no-deps -c constraints-oldest.txt torch
	$(PIP) install -c constraints-oldest.txt -e . --group test-oldest
	touch $@
