# make serve   installs, then serves the bundled demo model on loopback (HTTP 8000, gRPC 8001, metrics 8002)
# make test    linters, types, import contract, the whole test suite, smoke
# make unit    the test suite alone (ARGS=tests/core for a part of it)
# make smoke   a real server on free ports, every protocol with real clients
# make real-triton   the backend inside a real Triton (LLMBACKEND_REAL_TRITON=folder; docs/inside_triton.md)
# make conformance   the golden transcripts of a real Triton replayed against this host
# make conformance-live   a real Triton (370 MB from the package index) and this server, the same requests to both
# make chaos   faults of every kind under live streams: nothing lost, repeated or changed (10 minutes)
# make soak    saturation with random cancels and kills (20 minutes; ARGS="--minutes 120" for longer)
# make overload   ten times the capacity offered for a minute
# make fuzz    hostile input on every protocol and configuration beside live streams (10 minutes)
# make stall   every kind of input at its largest beside streams and a health probe: how long they wait (5 minutes)
# make idle    the CPU use of a whole server that nobody uses
# make bench   our engine and its peers in turns, into docs/benchmarks.md (hours; ARGS="--rounds 1 --models llama-125m-shape" for less)

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# pip shows its bars on a terminal and says nothing elsewhere.
PIP_QUIET := $(shell [ -t 2 ] || echo --quiet)
PIP_INSTALL := $(BIN)/python -m pip install $(PIP_QUIET) --disable-pip-version-check --constraint constraints.txt
ARGS ?=

.PHONY: serve test lint unit smoke conformance conformance-live real-triton chaos soak overload idle fuzz stall bench clean

serve: $(VENV)/.serve
	$(BIN)/llmbackend serve --model-repository model_repository --http-address 127.0.0.1 --grpc-address 127.0.0.1 $(ARGS)

test: lint unit smoke

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# A worker for each of two cores; a file's tests stay together, since they share their servers.
unit: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

smoke: $(VENV)/.test
	$(BIN)/python tools/smoke.py

conformance: $(VENV)/.test
	$(BIN)/python -m tests.conformance

real-triton: $(VENV)/.test
	LLMBACKEND_REAL_TRITON=$(LLMBACKEND_REAL_TRITON) $(BIN)/python -m pytest tests/real_triton $(ARGS)

conformance-live: $(VENV)/.test
	$(BIN)/python -m tests.live $(ARGS)

chaos soak overload idle: $(VENV)/.test
	$(BIN)/python -m tests.chaos $@ $(ARGS)

fuzz: $(VENV)/.test
	$(BIN)/python -m tests.fuzz $(ARGS)

stall: $(VENV)/.test
	$(BIN)/python -m tests.stall $(ARGS)

bench: $(VENV)/.serve
	$(BIN)/python -m benchmarks $(ARGS)

# `make serve` installs what serving needs and no more; `make test` adds the test tools.
$(VENV)/.serve: pyproject.toml constraints.txt $(wildcard llmbackend/engine/kernels/native/*.* llmbackend/engine/kernels/native/*/*.*)
	@echo "installing into $(VENV): torch is large and the native kernels are compiled, this takes a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --editable .
	touch $@

$(VENV)/.test: $(VENV)/.serve
	$(PIP_INSTALL) --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
