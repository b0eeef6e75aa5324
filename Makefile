# Everything runs from a virtual environment in .venv, made by the first target that needs it.
#   make demo   the whole story: a small model, supervised warm-up, then asynchronous GRPO (a few minutes on 2 cores)
#   make test   unit and integration tests
#   make bench  the replay buffer beside others (several minutes; benchmarks/buffer.py --quick: one)
#   make soak   kill and stop the buffer's processes for an hour (MINUTES=60)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MINUTES ?= 60
# A machine with a GPU gets the CUDA build of vLLM, any other the CPU build. Both install the same module: never both.
ENGINE ?= $(if $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes),gpu,cpu)
# The CPU build of torch is not on PyPI: take it from pip's find-links folder if there is one, else from torch's index.
ifeq ($(ENGINE),cpu)
UV_TORCH := $(if $(wildcard $(PIP_FIND_LINKS)/torch-*+cpu*.whl),--find-links $(PIP_FIND_LINKS),--torch-backend cpu)
endif

.PHONY: setup demo test test-unit lint bench soak clean
.DELETE_ON_ERROR:

setup: $(VENV)/installed-$(ENGINE)

$(VENV)/installed-$(ENGINE): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	rm -f $(VENV)/installed-*
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet $(UV_TORCH) --editable '.[$(ENGINE),dev]'
	touch $@

# The demo wants an engine and two learner ranks: with fewer GPUs than three the ranks stay on the CPU.
DEMO_FLAGS := $(if $(filter 1 2,$(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')),--learners.device=cpu)
demo: setup
	$(BIN)/python examples/sort_digits.py data/sort
	$(BIN)/asyncrl launch --config examples/sft_sort.toml $(DEMO_FLAGS)
	$(BIN)/asyncrl launch --config examples/grpo_async.toml $(DEMO_FLAGS)

test: setup
	$(BIN)/python -m pytest tests

test-unit: setup
	$(BIN)/python -m pytest tests -m "not integration"

# The replay buffer beside others, and by size, durability and faults.
bench: setup
	$(BIN)/python benchmarks/buffer.py

soak: setup
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

clean:
	rm -rf $(VENV) runs data
