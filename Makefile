# make demo   set up, plan two study machines in every preset, draw them, make a report: out/ (about a minute)
# make test   set up, check style and types, run every test this machine can run
# make setup  prepare .venv with homenode and its probe in it, from locked dependencies
# make quick  tests of two minutes: no VM, Slurm, browser or PDF, none that is slow (PATHS=tests/plan: fewer)
# make check  style, types and how large the house may be (make style, make types, make counts: one of them)
# make nightly  frozen answers, fuzz, kills, other programs, VMs in virtual hosts (SEED=7 PART=kills: one again)
# make bench  speed of planning and of commands, as ratios measured in one run
# make gpu-check  on a machine with a GPU: the tests that need one
# make docs   the pages of docs/ as a site with search: build/site/index.html
# make deb    dist/homenode_VERSION_ARCH.deb: programs, manual pages, completion, units
# make dist   wheel, sdist, deb, list of parts (CycloneDX) and checksums, all in dist/
# make lock   renew the locks
# make clean  remove everything that the other targets made
# make help   these lines
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
CHECKS := $(VENV)/.checks
PROGRESS = sh packaging/with-progress
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
INSTALL = $(PIP) --no-deps --no-build-isolation -e .

.PHONY: quick gpu-check wheel runtime setup probe demo test nightly check style types counts bench docs deb dist lock clean help

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

setup: probe

$(STAMP): packaging/setup.lock pyproject.toml hatch_build.py native/sources.txt
	@command -v $(PYTHON) >/dev/null || \
	  { echo "homenode needs Python 3.11 or newer; no $(PYTHON) found. Debian: apt install python3-venv" >&2; exit 3; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "homenode needs Python 3.11 or newer; $$($(PYTHON) --version) found. Try: make PYTHON=python3.12" >&2; exit 3; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo "Python has no ensurepip: install your distribution's venv package (Debian: python3-venv)" >&2; exit 3; }
	@echo "installing homenode and its libraries into $(VENV): about 15 seconds"
	@$(PROGRESS) $(PYTHON) -m venv $(VENV)
	@$(PROGRESS) $(PIP) --no-compile --require-hashes -r packaging/setup.lock
	@HOMENODE_NO_PROBE=1 $(PROGRESS) $(INSTALL)
	@touch $@

# What checks and tests run with.
$(CHECKS): $(STAMP) requirements.lock
	@echo "installing what checks and tests run with: about half a minute"
	@$(PROGRESS) $(PIP) --require-hashes -r requirements.lock
	@touch $@

# The probe is built by the package's build hook where there is a C++ compiler.
probe: $(STAMP)
	@if [ -x $(BIN)/homenode-probe ]; then exit 0; fi; \
	if command -v "$${CXX:-c++}" >/dev/null; then echo "building homenode-probe: about a minute"; $(PROGRESS) $(INSTALL); else \
	echo "no C++ compiler: homenode-probe is missing, and measuring (homenode bench, homenode trial) needs it." >&2; \
	echo "  To get it: install one (Debian: apt install g++ make), then run make setup again." >&2; fi

demo: $(STAMP)
	$(BIN)/python demo/run.py out

style: $(CHECKS)
	$(BIN)/ruff format --check src tests bench demo packaging hatch_build.py
	$(BIN)/ruff check src tests bench demo packaging hatch_build.py

types: $(CHECKS)
	$(BIN)/mypy

# How large the house may be: tests/house_bounds.toml.
counts: $(CHECKS)
	$(BIN)/python -m tests.house_counts --check

check: style types counts

# One process more than there are cores: tests of daemons and of machines that boot mostly wait.
WORKERS := $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n + 1 : 8)))
test: check probe
	$(BIN)/pytest -m "not lab" -n $(WORKERS) --dist loadgroup

# Without a daemon, a machine that boots, or a program that takes long; and without tests/slow.txt.
QUICK = not (slow or lab or root or libvirt or qemu or slurm or browser or pdf or gpu or ansible)
PATHS = tests
quick: $(CHECKS) probe
	$(BIN)/pytest -m "$(QUICK)" -n auto --maxprocesses 8 --dist worksteal $(PATHS)

# Parts: frozen fuzz kills conformance without-cluster lab. All are run with one seed, which is printed.
nightly: $(CHECKS) probe
	$(BIN)/python -m tests.nightly $(SEED:%=--seed %) $(PART:%=--part %)

gpu-check: $(CHECKS) probe
	$(BIN)/pytest -m gpu tests

bench: $(CHECKS) probe
	$(BIN)/python bench/plan_speed.py
	$(BIN)/python bench/host_speed.py
	$(BIN)/python bench/command_speed.py
	$(BIN)/python bench/slurm_audit_speed.py
	$(BIN)/python bench/report_speed.py 200
	$(BIN)/python bench/probe_peers.py 3

lock:
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --custom-compile-command "make lock" requirements.in -o requirements.lock
	# The part of it that homenode runs with and is built with, for make setup; without the latter, for
	# packages and images; and what packages and pages are built with.
	sed '/^# checks/,$$d' requirements.in | $(BIN)/uv pip compile -q --universal \
	  --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
	  --custom-compile-command "make lock" -c requirements.lock - -o packaging/setup.lock
	sed '/^# building/,$$d' requirements.in | $(BIN)/uv pip compile -q --universal \
	  --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
	  --custom-compile-command "make lock" -c requirements.lock - -o packaging/runtime.lock
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-annotate --custom-compile-command "make lock" \
	  packaging/tools.in -o packaging/tools.lock

# A venv of its own: nothing that builds packages is among what tests run with.
TOOLS := build/tools
$(TOOLS)/.ready: packaging/tools.lock
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

docs: $(TOOLS)/.ready $(CHECKS)
	mkdir -p build && $(BIN)/python -m tests.doc_pictures build
	$(BIN)/python -m tests.doc_tree build
	$(TOOLS)/bin/sphinx-build -q -W --keep-going -b html -c packaging/docs build/docs build/site
	@echo "pages: build/site/index.html"

# The probe of a package brings the C++ library along: a host may have none.
WHEEL := dist/wheel
wheel: $(STAMP)
	rm -rf $(WHEEL) build/probe/homenode-probe
	LDFLAGS='-static-libstdc++ -static-libgcc' $(BIN)/python -m pip wheel --quiet --no-deps \
	  --disable-pip-version-check --no-build-isolation -w $(WHEEL) .

# What packages hold, installed from its lock, with hashes. cyclonedx-py lists it with our own wheel.
runtime: wheel
	$(PYTHON) -m venv --clear build/runtime
	build/runtime/bin/pip install --quiet --disable-pip-version-check --require-hashes \
	  -r packaging/runtime.lock
	build/runtime/bin/pip install --quiet --disable-pip-version-check --no-deps --no-index \
	  $(WHEEL)/homenode-*.whl

deb: runtime $(TOOLS)/.ready $(CHECKS)
	$(BIN)/python -m tests.doc_tree build
	$(TOOLS)/bin/sphinx-build -q -W -t manual -b man -c packaging/docs build/docs build/man
	build/runtime/bin/python packaging/debian.py $(WHEEL)/homenode-*.whl \
	  build/runtime/lib/python3.*/site-packages build/man dist

dist: docs deb
	cp $(WHEEL)/homenode-*.whl dist/
	$(BIN)/python -m hatchling build -t sdist -d dist >/dev/null
	$(TOOLS)/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml \
	  --outfile dist/homenode.cdx.json build/runtime/bin/python
	cd dist && sha256sum homenode* > SHA256SUMS && cat SHA256SUMS

clean:
	rm -rf $(VENV) out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
