# Two commands: `make demo` trains and evaluates, `make test` tests; each sets itself up first.
VENV ?= .venv
LIGHTNING_IR = .venv-lightning-ir
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

.PHONY: help demo ablation bench bench-reckoned bench-peers bench-gpu compatibility figures
.PHONY: test test-sim test-lightning-ir test-oldest fuzz mutate
.PHONY: site serve site-zensical test-site notebooks test-notebooks test-triton compile-kernels lint wheel clean
help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

demo: $(VENV)/.demo  ## train a sparse retriever on your Python's documentation (ARGS="--help")
	$(PY) -m sparse_losses.demo $(ARGS)

ablation: $(VENV)/.demo  ## every loss of the demo switched off in turn, three seeds
	$(PY) -m benchmarks.studies.ablation --jobs $(JOBS) $(ARGS)

bench: $(VENV)/.demo  ## every loss beside its plain formula (ARGS="--suite full --only nws")
	$(PY) -m benchmarks $(ARGS)

bench-reckoned: $(VENV)/.dev  ## launches, waits, bytes and products on a simulated accelerator
	$(PY) -m benchmarks.studies.reckoned $(ARGS)

bench-peers: $(VENV)/.demo  ## install the packages that the benchmarks compare with
	$(PIP) install -c constraints.txt --group bench

bench-gpu: $(VENV)/.dev  ## all that a GPU is asked for, 25 minutes: make CUDA=1 bench-gpu (ARGS="losses")
	PYTHON=$(PY) benchmarks/gpu.sh $(ARGS)

# In the order of the files: by the number of tests, files of few but long tests would come last.
test: $(VENV)/.dev  ## all tests on the CPU (ARGS="-k info_nce")
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

# Left to the CPU: what takes long and is the same on every device. In processes of their own: what
# sees an accelerator moves its tensors there.
ON_SIM = not (compile or graph or check or second or vmap or refused or pickling)
test-sim: $(VENV)/.dev  ## launches, waits and the contract on a simulated accelerator; needs a C++ compiler
	$(if $(ARGS),,OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile tests/simulated_device)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --device sim -k "$(ON_SIM)" tests/losses/test_contract.py \
	  tests/representation/test_head.py tests/representation/test_pooling.py \
	  tests/objective/test_objective.py $(ARGS)

test-triton: $(VENV)/.dev  ## the head's kernel: in Triton's interpreter where there is no GPU
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) tests/representation/test_triton_head.py $(ARGS)

fuzz: $(VENV)/.dev  ## random calls against their formulas (ARGS="--minutes 60", "--device sim")
	OMP_NUM_THREADS=1 $(PY) -m tools.fuzz $(ARGS)

compile-kernels: $(VENV)/.dev  ## the head's kernel down to machine code for a GPU that need not be there
	$(PY) -m tools.compile_kernels $(ARGS)

test-lightning-ir: $(LIGHTNING_IR)/.ready  ## what needs lightning-ir, in an environment of its own
	OMP_NUM_THREADS=1 $(LIGHTNING_IR)/bin/python -m pytest \
	  tests/lightning_ir sparse_losses/integrations/lightning_ir.py docs/lightning_ir.md $(ARGS)

# Without other people's trainers, and without the kernel, whose Triton wants a newer PyTorch.
OF_THE_PACKAGE = tests/_core tests/distributed tests/fast tests/losses tests/objective tests/representation \
  tests/vocabulary tests/test_presets.py tests/test_queue.py
test-oldest: $(OLDEST)/.ready  ## the package on the oldest PyTorch that it takes, in an environment of its own
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n $(JOBS) --dist loadfile \
	  $(OF_THE_PACKAGE) $(ARGS)

mutate: $(VENV)/.mutate  ## does a test fail where a line is wrong? (ARGS="--only losses/ --seed 1")
	OMP_NUM_THREADS=1 CI=1 PYTHONPATH=build/mutate $(PY) -m tools.mutate $(ARGS)

compatibility: $(VENV)/.dev  ## what works with what: run those tests, write docs/compatibility.md
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile tests -m works_with \
	  --compatibility build/compatibility/main.json
	$(MAKE) test-lightning-ir ARGS="-m works_with --compatibility $(abspath build/compatibility)/lightning-ir.json"
	$(PY) tools/compatibility.py build/compatibility/*.json

figures: $(VENV)/.docs  ## draw the pictures of the docs anew (ARGS="info_nce"); the site draws them by itself
	$(PY) -m tools.figures $(ARGS)

# Drawn with the package and from committed results, hence again when one of these has changed.
FIGURES = docs/figures/.drawn
$(FIGURES): $(VENV)/.docs $(wildcard tools/figures/*.py docs/results/* benchmarks/results/*.csv)
$(FIGURES): $(shell find sparse_losses -name '*.py')
	rm -rf $(@D)
	$(PY) -m tools.figures
	touch $@

site: $(FIGURES)  ## build the docs site into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	$(PY) -m tools.llms build/site
	$(PY) -m tools.notebooks build/site/notebooks

serve: $(FIGURES)  ## the docs site on this machine, built anew at every change
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs serve

site-zensical: $(FIGURES)  ## the same site by Zensical, into build/zensical
	sed 's#^site_dir:.*#site_dir: build/zensical#' mkdocs.yml > .zensical.yml
	$(VENV)/bin/zensical build --clean --strict --config-file .zensical.yml
	rm .zensical.yml
	$(PY) -m tools.llms build/zensical
	$(PY) -m tools.notebooks build/zensical/notebooks

notebooks: $(VENV)/.docs  ## the guides as Jupyter notebooks and scripts, in build/notebooks
	$(PY) -m tools.notebooks build/notebooks

test-notebooks: $(VENV)/.docs  ## the same, and run every script that downloads nothing
	$(PY) -m tools.notebooks build/notebooks --run

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
	rm -rf $(VENV) $(LIGHTNING_IR) $(OLDEST) build dist docs/figures .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "sparse-losses needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt pip
	$(PIP) install $(TORCH_SOURCE) --no-deps -c constraints.txt torch
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) install -c constraints.txt -e '.[demo]'
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

$(LIGHTNING_IR)/.ready: VENV = $(LIGHTNING_IR)
$(LIGHTNING_IR)/.ready: constraints-lightning-ir.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints-lightning-ir.txt pip
	$(PIP) install $(TORCH_SOURCE) --no-deps -c constraints-lightning-ir.txt torch
	$(PIP) install -c constraints-lightning-ir.txt -e '.[lightning-ir]' --group test-lightning-ir
	touch $@

$(OLDEST)/.ready: VENV = $(OLDEST)
$(OLDEST)/.ready: constraints-oldest.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints-oldest.txt pip
	$(PIP) install $(TORCH_SOURCE) --no-deps -c constraints-oldest.txt torch
	$(PIP) install -c constraints-oldest.txt -e . --group test-oldest
	touch $@
