PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OLDEST_TRITON := $(VENV)/triton-3.6.0
# The integrations have runs of their own: each session looks through all modules that are loaded.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadgroup
WITH_OLDEST := AMP_OLDEST_TRITON=$(abspath $(OLDEST_TRITON))
PYTEST_GPU := PYTHONPATH=. $(PYTHON) -m pytest -m "gpu or triton" -p no:cacheprovider -p no:benchmark -rs  # pytest-benchmark warns beside -n

.PHONY: help install demo docs test test-changed test-slow test-all test-gpu test-gpu-kernels test-gpu-training test-gpu-ops sanitize first-gpu bench bench-gpu bench-gpu-kernels bench-gpu-fp8 bench-gpu-step predict lint types mypy pyright format wheel clean
.DEFAULT_GOAL := help

help:  ## Show this
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(READY)  ## Make .venv with the tested versions

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev,docs,examples,integrations]"
	-$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null  # on all cores, which pip does on one
	@touch $@

demo: $(READY)  ## Train on real digits at every opt level: one table, one picture
	$(BIN)/python examples/digits.py

test: $(READY)  ## Run the tests of what users see, in about 4 minutes on 2 idle cores
	$(PYTEST) -m "not slow" --ignore tests/integrations
	$(PYTEST) -m "not slow" tests/integrations

test-changed: $(READY)  ## Run those that what differs from BASE=main needs, by folder
	$(PYTEST) -m "not slow" $$(git diff --name-only $(or $(BASE),main) | $(BIN)/python tests/changed.py)

test-slow: $(READY) $(OLDEST_TRITON)  ## Run the others: interpreter, compilers, browser, examples, oldest Triton
	$(WITH_OLDEST) $(PYTEST) -m slow --ignore tests/integrations
	$(WITH_OLDEST) $(PYTEST) -m slow tests/integrations

$(OLDEST_TRITON): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==3.6.0

test-all: test test-slow  ## Run all tests

test-gpu: test-gpu-kernels test-gpu-training test-gpu-ops  ## Run the tests that need a GPU, with the python3 at hand

test-gpu-kernels:  ## Those of the kernels
	$(PYTEST_GPU) tests/kernels/test_operations.py tests/kernels/test_merge.py tests/kernels/test_quantize.py tests/kernels/test_scaled_mm.py tests/kernels/test_fp4_tiles.py tests/kernels/test_fp8_layer.py tests/kernels/test_launch_plans.py tests/kernels/test_stepping.py tests/kernels/test_split.py

test-gpu-training:  ## Those of training
	$(PYTEST_GPU) tests/test_bad_steps.py tests/test_changes_between_steps.py tests/test_cuda_graph.py tests/test_host_sync.py tests/test_scalars.py

test-gpu-ops:  ## Those of op casting, in eight processes
	$(PYTEST_GPU) -n 8 tests/test_ops.py

first-gpu:  ## Run in 12 minutes what a GPU is to show first, with the python3 at hand; OUT is the folder
	PYTHONPATH=. $(PYTHON) docs/benchmarks/first_gpu.py $(if $(OUT),--out $(OUT))

sanitize:  ## Look for stray accesses of the kernels on a GPU, with the python3 at hand
	tests/sanitize.sh $(PYTHON)

bench: $(READY)  ## Measure the kernels' plain torch selves, the step and op casting on the CPU, once their tests pass
	$(BIN)/python -m pytest -q tests/kernels/test_operations.py tests/kernels/test_quantize.py tests/test_ops.py
	PYTHONPATH=. $(BIN)/python docs/benchmarks/bench_kernels.py --device cpu
	PYTHONPATH=. $(BIN)/python docs/benchmarks/bench_fp8.py --device cpu
	PYTHONPATH=. $(BIN)/python docs/benchmarks/bench_step.py --device cpu
	$(BIN)/python docs/benchmarks/plot_step.py docs/benchmarks/step-cpu.md
	PYTHONPATH=. $(BIN)/python docs/benchmarks/bench_host.py
	PYTHONPATH=. $(BIN)/python docs/benchmarks/bench_small.py
	PYTHONPATH=. $(BIN)/python docs/benchmarks/bench_opcast.py

bench-gpu: bench-gpu-kernels bench-gpu-fp8 bench-gpu-step  ## Measure on a GPU, with the python3 at hand; OUT is the folder of the rows
	-$(PYTHON) docs/benchmarks/plot_step.py $(or $(OUT),docs/benchmarks)/step-cuda.md

bench-gpu-kernels bench-gpu-fp8 bench-gpu-step: bench-gpu-%:
	PYTHONPATH=. $(PYTHON) docs/benchmarks/bench_$*.py --device cuda $(if $(OUT),--out $(OUT)) $(BENCH_OPTIONS)

predict: $(READY)  ## Predict the kernels' bandwidth from their compiled code, for GPUs that are not at hand
	PYTHONPATH=. $(BIN)/python docs/benchmarks/predict_kernels.py

docs: $(READY)  ## Build the site into build/site, and check its links
	PYTHONPATH=. $(BIN)/python docs/site/reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --clean --config-file docs/site/mkdocs.yml

lint: $(READY)  ## Check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: mypy pyright  ## Check types

mypy pyright: $(READY)
	$(BIN)/$@

format: $(READY)  ## Rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(READY)  ## Build the wheel into dist/
	rm -rf build/lib dist
	$(BIN)/python -m build --wheel --outdir dist .

clean:  ## Remove what the other targets made
	rm -rf $(VENV) build dist outputs *.egg-info .pytest_cache .mypy_cache .ruff_cache
