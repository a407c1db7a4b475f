# `make serve`, `make test`, `make test-fast`, `make explore`: each installs what it needs into .venv first.
PYTHON ?= python3
VENV ?= .venv
CLIENTS ?= .venv-clients
PEERS ?= .venv-peers
AUDIT ?= .venv-audit
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-deps
LOCKS := -r requirements.lock -r requirements-dev.lock
TORCH := https://download.pytorch.org/whl/cpu
ARGS ?=
# Processes of `make test`: one more than two cores, because tests often wait for servers that they started.
WORKERS ?= 3

# What test-fast leaves out (markers: tests/conftest.py); unlike -m alone, --ignore also saves the imports.
SLOW_FOLDERS := tests/engine tests/e2e tests/gateway tests/bench

.PHONY: audit chromium clients docker loops peers install postgres rabbitmq serve test test-fast explore lint bench clean
install: $(VENV)/.installed

# The lock is complete, so nothing is resolved: --no-deps keeps CUDA builds of torch's companions out.
$(VENV)/.installed: requirements.lock requirements-dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Headway needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@$(PIP) $(LOCKS) && echo "all packages are from pip's own index" \
	  || { echo "pip's own index has not all of them; with PyTorch's ($(TORCH)):"; \
	       $(PIP) --extra-index-url $(TORCH) $(LOCKS); }
	$(PIP) --editable .
	$(BIN)/python -m compileall -q src benchmarks testing  # else each process does it where none may write bytecode
	$(BIN)/python -m headway.engines.vllm.process.metadata
	@touch $@

serve: install
	$(BIN)/headway model fetch
	exec $(BIN)/headway serve $(ARGS)

# The dashboard's tests need Chromium; where it can be installed, it is, and where not, they say so.
chromium:
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null \
	  || { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; } > /dev/null 2>&1 \
	  || echo "Chromium cannot be installed here, so the dashboard is not tested in a browser."

# Tests start a PostgreSQL of their own; where its server can be installed, it is, and where not, they say so.
postgres:
	@command -v postgres > /dev/null || ls /usr/lib/postgresql/*/bin/postgres > /dev/null 2>&1 \
	  || test -n "$$HEADWAY_POSTGRES_URL" \
	  || { apt-get update -qq && apt-get install -qq -y --no-install-recommends postgresql; } > /dev/null 2>&1 \
	  || echo "PostgreSQL cannot be installed here, so the queue in it is not tested."

# As for PostgreSQL; its tests start a server of their own, so the one of the package need not run.
rabbitmq:
	@ls /usr/lib/rabbitmq/lib/*/sbin/rabbitmq-server > /dev/null 2>&1 || command -v rabbitmq-server > /dev/null \
	  || test -n "$$HEADWAY_RABBITMQ_URL" \
	  || { apt-get update -qq && apt-get install -qq -y --no-install-recommends rabbitmq-server; } > /dev/null 2>&1 \
	  || echo "RabbitMQ cannot be installed here, so control over it is not tested."

# As for PostgreSQL; its tests start a daemon of their own, which only root may.
docker:
	@command -v dockerd > /dev/null || test "$$(id -u)" != 0 \
	  || { apt-get update -qq && apt-get install -qq -y --no-install-recommends docker.io; } > /dev/null 2>&1 \
	  || echo "Docker cannot be installed here, so sandboxes in containers are not tested."

# Client libraries want other versions of what Headway uses, so they have an environment of their own.
clients: requirements-clients.lock
	@test -e $(CLIENTS)/.installed -a ! requirements-clients.lock -nt $(CLIENTS)/.installed \
	  || { $(PYTHON) -m venv $(CLIENTS) \
	       && $(CLIENTS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-clients.lock \
	       && touch $(CLIENTS)/.installed; } \
	  || { rm -rf $(CLIENTS); echo "Client libraries cannot be installed here, so they are not tested."; }

# Gateways of other projects, for `headway bench overhead --peers`: 830 MB, so no other target installs them.
peers: requirements-peers.lock
	@test -e $(PEERS)/.installed -a ! requirements-peers.lock -nt $(PEERS)/.installed \
	  || { $(PYTHON) -m venv $(PEERS) \
	       && $(PEERS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-peers.lock \
	       && touch $(PEERS)/.installed; } \
	  || { rm -rf $(PEERS); echo "The peers cannot be installed here; pip says above why."; exit 1; }

test: install chromium docker postgres rabbitmq
	$(BIN)/headway model fetch
	$(MAKE) --no-print-directory --jobs=2 clients loops
	$(BIN)/pytest --numprocesses=$(WORKERS) --dist=loadscope --no-loadscope-reorder $(ARGS)

# Hot loops are compiled once, before several workers of the tests would do so at the same time.
loops: install
	@$(BIN)/headway simulate --duration 1 > /dev/null

# Decisions only: no engine, no server. Compiled code is cached, so the first run takes minutes longer.
test-fast: install
	$(BIN)/pytest -m "not (engine or server or slow)" $(addprefix --ignore=,$(SLOW_FOLDERS)) $(ARGS)

# Property tests on examples that no run before has drawn; what fails becomes a test of its own.
explore: install
	$(BIN)/headway model fetch
	$(BIN)/pytest -m hypothesis --hypothesis-profile=explore $(ARGS)

lint: install
	$(BIN)/ruff check src tests tools examples benchmarks testing
	$(BIN)/ruff format --check src tests tools examples benchmarks testing
	$(BIN)/mypy

# Known vulnerabilities of all packages in the locks, by PyPI's advisories; `make test` does not ask the network for them.
# A version without its local part (+cpu) is the one that PyPI knows.
ADVISORIES := https://pypi.org/pypi/pip/json
audit:
	@if ! $(PYTHON) -c 'import urllib.request as web; web.urlopen("$(ADVISORIES)", timeout=10)' 2> /dev/null; then \
	  echo "Skipped: PyPI cannot be reached from here, so no package has been audited."; exit; fi; set -e; \
	test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) \
	  && $(AUDIT)/bin/pip install --quiet --disable-pip-version-check pip-audit==2.10.1; }; \
	for lock in requirements*.lock; do sed 's/+[a-z0-9.]*$$//' $$lock > $(AUDIT)/$$lock; done; \
	$(AUDIT)/bin/pip-audit --no-deps --disable-pip $(patsubst %,-r $(AUDIT)/%,$(wildcard requirements*.lock)) $(ARGS)

bench: install
	$(BIN)/headway model fetch
	$(BIN)/headway bench compare --quick --out out/compare $(ARGS)

clean:
	rm -rf $(VENV) $(CLIENTS) $(PEERS) $(AUDIT) out
