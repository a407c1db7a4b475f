# `make serve`, `make test`, `make test-fast`, `make explore`: each installs what it needs into .venv first.
PYTHON ?= python3
VENV ?= .venv
CLIENTS ?= .venv-clients
NODE := tests/e2e/clients/node
PEERS ?= .venv-peers
OPEN_WEBUI ?= .venv-open-webui
AUDIT ?= .venv-audit
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-compile
LOCKS := -r requirements.lock -r requirements-dev.lock
TORCH := https://download.pytorch.org/whl/cpu
ARGS ?=
REGISTRY ?=
# vLLM's build: for CUDA where the driver finds a GPU (DEVICE=cpu says otherwise), else the locked one for CPUs.
DEVICE ?= $(shell nvidia-smi --list-gpus 2> /dev/null | grep -q . && echo cuda || echo cpu)
MAKEFLAGS += --jobs=2  # most steps take one core
# Processes of `make test`: more than the cores of a small machine, because tests often wait for servers that they
# started. Each takes up to 2.5 GB, and as much for its servers.
WORKERS ?= 3

# What test-fast leaves out (markers: tests/conftest.py); unlike -m alone, --ignore also saves the imports.
SLOW_FOLDERS := tests/engine tests/e2e tests/gateway tests/bench

.PHONY: audit clients envoy helm image loops model open-webui peers install ready rewritten servers serve test test-fast test-vllm explore lint bench clean
install: $(VENV)/.installed

# The lock is complete, so nothing is resolved: --no-deps keeps CUDA builds of torch's companions out.
define PACKAGES_cpu
$(PIP) $(LOCKS) && echo "all packages are from pip's own index" \
  || { echo "pip's own index has not all of them; with PyTorch's ($(TORCH)):"; \
       $(PIP) --extra-index-url $(TORCH) $(LOCKS); }
endef
# pip takes vLLM, and the PyTorch that it needs, from its index: no lock fits every driver.
define PACKAGES_cuda
echo "There is an NVIDIA GPU here: vLLM's CUDA build is installed (DEVICE=cpu for the other)." \
  && $(BIN)/pip install --quiet --disable-pip-version-check '.[vllm]' && $(PIP) -r requirements-dev.lock
endef
$(VENV)/.installed: requirements.lock requirements-dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Headway needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@$(PACKAGES_$(DEVICE))
	$(PIP) --editable .
	@# pip compiles on one core; and where no process may write bytecode, each would compile Headway by itself.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib src benchmarks testing || true  # a package may be of a newer Python
	$(BIN)/python -m headway.engines.vllm.process.metadata
	@touch $@

serve: model
	exec $(BIN)/headway serve $(ARGS)

# What tests start beside engines: a browser, node for agents, PostgreSQL and RabbitMQ (or those of $HEADWAY_POSTGRES_URL and
# $HEADWAY_RABBITMQ_URL), and Docker, which only root may start. What is missing is installed, where it can be.
servers:
	@has() { for one in "$$@"; do command -v $$one > /dev/null || ls $$one > /dev/null 2>&1 && return; done; false; }; \
	missing=; \
	has chromium chromium-browser google-chrome || missing=chromium; \
	has postgres "/usr/lib/postgresql/*/bin/postgres" || test -n "$$HEADWAY_POSTGRES_URL" || missing="$$missing postgresql"; \
	has rabbitmq-server "/usr/lib/rabbitmq/lib/*/sbin/rabbitmq-server" || test -n "$$HEADWAY_RABBITMQ_URL" \
	  || missing="$$missing rabbitmq-server"; \
	has npm || missing="$$missing nodejs npm"; \
	has dockerd || test "$$(id -u)" != 0 || missing="$$missing docker.io"; \
	test -z "$$missing" || apt-get update -qq > /dev/null 2>&1; \
	for one in $$missing; do apt-get install -qq -y --no-install-recommends $$one > /dev/null 2>&1 \
	  || echo "$$one cannot be installed here, so what needs it is not tested."; done

# Client libraries want other versions of what Headway uses, so they have an environment of their own. npm is of `servers`.
clients: servers requirements-clients.lock $(NODE)/package-lock.json
	@test -e $(CLIENTS)/.installed -a ! requirements-clients.lock -nt $(CLIENTS)/.installed \
	  || { $(PYTHON) -m venv $(CLIENTS) \
	       && $(CLIENTS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-clients.lock \
	       && touch $(CLIENTS)/.installed; } \
	  || { rm -rf $(CLIENTS); echo "Client libraries cannot be installed here, so they are not tested."; }
	@test -e $(CLIENTS)/node/.installed -a ! $(NODE)/package-lock.json -nt $(CLIENTS)/node/.installed \
	  || { mkdir -p $(CLIENTS)/node && cp $(NODE)/package.json $(NODE)/package-lock.json $(CLIENTS)/node/ \
	       && npm ci --silent --no-audit --no-fund --prefix $(CLIENTS)/node && touch $(CLIENTS)/node/.installed; } \
	  || { rm -rf $(CLIENTS)/node; echo "Clients from npm cannot be installed here, so they are not tested."; }

# Renders the chart in tests.
helm: install
	@command -v helm > /dev/null || test -e .helm/helm || $(BIN)/python -m tools.helm .helm > /dev/null 2>&1 \
	  || echo "Helm cannot be installed here, so deploy/helm is not rendered."

# Sends requests to the endpoint picker in tests.
envoy: install
	@command -v envoy > /dev/null || test -e .envoy/envoy || $(BIN)/python -m tools.envoy .envoy > /dev/null 2>&1 \
	  || echo "Envoy cannot be installed here, so the picker is tested with its messages alone."

# Builds the image and starts its program once; CI does so where Docker runs and vLLM's image can be pulled.
# REGISTRY=... is a mirror of it.
image:
	@docker info > /dev/null 2>&1 || { echo "Skipped: no Docker daemon answers here, so no image has been built."; exit; }; \
	docker pull --quiet "$(REGISTRY)$$(sed -n 's/^FROM $${REGISTRY}//p' deploy/Dockerfile)" \
	  || { echo "Skipped: vLLM's image cannot be pulled, so no image has been built."; exit 0; }; \
	set -e; docker build -f deploy/Dockerfile --build-arg REGISTRY=$(REGISTRY) -t headway . ; docker run --rm headway --version

# Gateways of other projects, for `headway bench overhead --peers`: 830 MB, so no other target installs them.
peers: requirements-peers.lock
	@test -e $(PEERS)/.installed -a ! requirements-peers.lock -nt $(PEERS)/.installed \
	  || { $(PYTHON) -m venv $(PEERS) \
	       && $(PEERS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-peers.lock \
	       && touch $(PEERS)/.installed; } \
	  || { rm -rf $(PEERS); echo "The peers cannot be installed here; pip says above why."; exit 1; }

# For tests/gateway/test_open_webui.py: 2.9 GB, so `make test` runs it only where it has been installed. Open WebUI pins
# what it needs itself; PyTorch comes first, in the locked build for CPUs.
WEBUI_PIP := $(OPEN_WEBUI)/bin/pip install --quiet --disable-pip-version-check
open-webui:
	@test -e $(OPEN_WEBUI)/.installed \
	  || { $(PYTHON) -m venv $(OPEN_WEBUI) \
	       && $(WEBUI_PIP) --no-deps --extra-index-url $(TORCH) $$(grep ^torch== requirements.lock) \
	       && $(WEBUI_PIP) open-webui==0.12.4 && touch $(OPEN_WEBUI)/.installed; } \
	  || { rm -rf $(OPEN_WEBUI); echo "Open WebUI cannot be installed here; pip says above why."; exit 1; }

# pytest rewrites the assertions of all test files, half of what it does before the first test: it is done once, before
# several workers would each do so, and kept also where no process may write bytecode. What fails, `make test` reports.
rewritten: $(VENV)/.rewritten
$(VENV)/.rewritten: $(VENV)/.installed
	@PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --collect-only -q > /dev/null 2>&1 || true
	@touch $@

# All that tests need.
ready: loops model clients helm envoy servers rewritten

test: ready
	$(BIN)/pytest --numprocesses=$(WORKERS) --dist=loadscope --no-loadscope-reorder $(ARGS)

# The hook's tests against the Python files of another release of vLLM; what needs its kernels is skipped.
OTHER := .vllm-$(VERSION)
test-vllm: model
	@test -n "$(VERSION)" || { echo "Which one? make test-vllm VERSION=0.33.0"; exit 2; }
	@test -e $(OTHER)/vllm-$(VERSION)+cpu.dist-info || $(BIN)/python -m tools.vllm_sources $(VERSION) $(OTHER)
	HEADWAY_OTHER_VLLM=$(VERSION) PYTHONPATH=$(OTHER) $(BIN)/pytest --numprocesses=$(WORKERS) --dist=loadscope -rs \
	  $(addprefix tests/engine/test_,conformance.py grammar_time.py hook.py iteration_log.py licence.py names.py \
	  reserve_vllm.py reserving.py scheduler_stats.py sizes.py stock_features.py two_ended.py) $(ARGS)

# Hot loops are compiled once, before several workers of the tests would do so at the same time. All wait
# for the first, or make would begin the longest, which needs it, after all others.
loops: $(addprefix loop-,headway fleet bros ecoserve anneal)
loop-%: install
	@$(BIN)/headway simulate --duration 1 --recipes $* > /dev/null
$(addprefix loop-,fleet bros ecoserve anneal): loop-headway
loop-fleet:
	@$(BIN)/headway simulate --duration 1 --recipes headway --instances 2 > /dev/null

model: install
	$(BIN)/headway model fetch

# Decisions only: no engine, no server. Compiled code is cached, so the first run takes minutes longer.
test-fast: install
	$(BIN)/pytest -m "not (engine or server or slow)" $(addprefix --ignore=,$(SLOW_FOLDERS)) $(ARGS)

# Property tests on examples that no run before has drawn; what fails becomes a test of its own.
explore: model
	$(BIN)/pytest -m hypothesis --hypothesis-profile=explore $(ARGS)

lint: install
	$(BIN)/ruff check src tests tools examples benchmarks testing
	$(BIN)/ruff format --check src tests tools examples benchmarks testing
	$(BIN)/mypy

# Known vulnerabilities of all packages in the locks, by PyPI's advisories; `make test` does not ask the network for them.
# A version without its local part (+cpu) is the one that PyPI knows.
ADVISORIES := https://pypi.org/pypi/pip/25.0/json
audit:
	@if ! $(PYTHON) -c 'import urllib.request as web; web.urlopen("$(ADVISORIES)", timeout=10)' 2> /dev/null; then \
	  echo "Skipped: PyPI's advisories cannot be read from here, so no package has been audited."; exit; fi; set -e; \
	test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) \
	  && $(AUDIT)/bin/pip install --quiet --disable-pip-version-check pip-audit==2.10.1; }; \
	failed=0; for lock in requirements*.lock; do sed 's/+[a-z0-9.]*$$//' $$lock > $(AUDIT)/$$lock; \
	  echo $$lock; $(AUDIT)/bin/pip-audit --no-deps --disable-pip -r $(AUDIT)/$$lock $(ARGS) || failed=1; done; exit $$failed

bench: model
	$(BIN)/headway bench compare --quick --out out/compare $(ARGS)

clean:
	rm -rf $(VENV) $(CLIENTS) $(PEERS) $(OPEN_WEBUI) $(AUDIT) .envoy .helm .vllm-* out
