# Every target that needs Python makes .venv first and installs into it; nothing else on the machine is touched.
# Needed: Python 3.10 or newer, make, a C++ compiler (MLX compiles some operations on the CPU while it runs).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Which build of MLX. On a Mac it comes with Metal; on Linux it is the CPU's, or with EXTRA=cuda the one for NVIDIA GPUs.
ifeq ($(shell uname -s),Darwin)
EXTRA ?=
else
EXTRA ?= cpu
endif
comma := ,
EXTRAS := $(if $(EXTRA),$(EXTRA)$(comma))test

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint bench soak fuzz crash real-model release clean

help:
	@echo "make demo     what the cache does, shown and checked on a tiny model (a few minutes with the install)"
	@echo "make test     the tests"
	@echo "make test-fast  those of blocks, tiers, the SSD, keys and settings, which need no MLX (half a minute)"
	@echo "make lint     ruff and mypy"
	@echo "make bench    the benchmarks, beside mlx-lm, vllm-mlx and mlx-vlm (some 15 minutes; BENCH=--quick takes 4)"
	@echo "make soak     a trace replayed with kills and faults, MINUTES=5"
	@echo "make crash    killed, cut off and refused by the disk at every call, MINUTES=10 of it (Linux)"
	@echo "make fuzz     the parsers under a fuzzer led by coverage, SECONDS=60 each (Linux)"
	@echo "make real-model  fetch a small pretrained model to measure on (92 MB; REAL_MODEL=FOLDER to keep it elsewhere)"
	@echo "make release  build the sdist and the wheel, try both in empty environments, and tag; refused until .ci/run has passed"
	@echo "make clean    remove .venv and all that was built or cached here"
	@echo
	@echo "PYTHON=python3.12   another Python;   EXTRA=cuda   MLX for NVIDIA GPUs (make clean before a change of EXTRA)"

$(STAMP): pyproject.toml setup.py $(wildcard prefixcache/kernels/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "$(PYTHON) is missing or older than 3.10: write make PYTHON=/path/to/python3.10-or-newer"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -e ".[$(EXTRAS)]"
	@touch $@

demo: $(STAMP)
	$(BIN)/prefixcache demo

FAST := tests/blocks tests/tiers tests/ssd tests/test_keys.py tests/test_settings.py

# OpenBLAS, where it is, multiplies float32 rows 16 to 50 times faster than what MLX's wheel brings on Linux; two of its
# threads would wait for each other beside other tests. Batches are tested with MLX's own products, in which a row doesn't
# depend on its neighbours.
BLAS := $(firstword $(wildcard /usr/lib/*/openblas-pthread/libopenblas.so.0))
BATCHES := tests/live tests/ranks tests/servers
FILES := -n auto --dist loadfile --no-loadscope-reorder

test: test-fast
	$(BIN)/python -m pytest $(FILES) $(BATCHES)
	LD_PRELOAD=$(BLAS) OPENBLAS_NUM_THREADS=1 \
	  $(BIN)/python -m pytest $(FILES) $(FAST:%=--ignore=%) $(BATCHES:%=--ignore=%)

test-fast: $(STAMP)
	$(BIN)/python -m pytest -p tests.without_mlx -n auto --dist worksteal $(FAST)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

BENCH ?=

bench: $(STAMP)
	$(BIN)/python -m tools.bench $(BENCH)

MINUTES ?=
SECONDS ?= 60

soak: $(STAMP)
	$(BIN)/python -m tools.soak --minutes $(or $(MINUTES),5)

crash: $(STAMP)
	$(BIN)/python -m tests.crash --rounds 500 --power --minutes $(or $(MINUTES),10)

fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet atheris
	$(BIN)/python -m tests.fuzz.atheris_run --seconds $(SECONDS)

real-model: $(STAMP)
	@$(BIN)/python -m tools.real_model

release: $(STAMP)
	$(BIN)/python -m tools.release

clean:
	rm -rf $(VENV) prefixcache/kernels/*.so build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find prefixcache tools tests -name __pycache__ -type d -prune -exec rm -rf {} +
