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
# make dist   wheels, sdist, deb, container image, SBOM (CycloneDX) and checksums, all in dist/
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

$(STAMP): packaging/setup.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || \
	  { echo "homenode needs Python 3.11 or newer; no $(PYTHON) found. Debian: apt install python3-venv" >&2; exit 3; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "homenode needs Python 3.11 or newer; $$($(PYTHON) --version) found. Try: make PYTHON=python3.12" >&2; exit 3; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo "Python has no ensurepip: install your distribution's venv package (Debian: python3-venv)" >&2; exit 3; }
	@echo "installing homenode and its libraries into $(VENV): about 15 seconds"
	@$(PROGRESS) $(PYTHON) -m venv $(VENV)
	@$(PROGRESS) $(PIP) --no-compile --require-hashes -r packaging/setup.lock
	@$(PROGRESS) $(INSTALL)
	@touch $@

# What checks and tests run with.
$(CHECKS): $(STAMP) requirements.lock
	@echo "installing what checks and tests run with: about half a minute"
	@$(PROGRESS) $(PIP) --require-hashes -r requirements.lock
	@touch $@

# Built in build/probe, copied beside homenode. Some distributions package the static C++ library apart.
BUILD_PROBE = $(MAKE) --no-print-directory -s -C native -j2
probe: $(STAMP)
	@if [ -x $(BIN)/homenode-probe ] && \
	  [ -z "$$(find native -type f -newer $(BIN)/homenode-probe)" ]; then exit 0; fi; \
	if command -v "$${CXX:-c++}" >/dev/null; then echo "building homenode-probe: about a minute"; \
	$(PROGRESS) $(BUILD_PROBE) && cp build/probe/homenode-probe $(BIN)/ || exit 3; \
	if $(PROGRESS) $(BUILD_PROBE) static; then cp build/probe/homenode-probe-static $(BIN)/; else \
	echo "no static libraries: homenode-probe-static, which measures in guests, is missing" >&2; fi; else \
	echo "no C++ compiler: homenode-probe is missing, and measuring (homenode bench, homenode trial) needs it." >&2; \
	echo "  To get it: install one (Debian: apt install g++ make), then run make setup again." >&2; fi

demo: $(STAMP)
	$(BIN)/python demo/run.py out

style: $(CHECKS)
	$(BIN)/ruff format --check src tests bench demo packaging
	$(BIN)/ruff check src tests bench demo packaging

types: $(CHECKS)
	$(BIN)/mypy

# How large the house may be: tests/house_bounds.toml.
counts: $(CHECKS)
	$(BIN)/python -m tests.house_counts --check

check: style types counts

# One process more than there are cores: tests of daemons and of machines that boot mostly wait.
WORKERS := $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n + 1 : 8)))
test: check probe
	$(BIN)/pytest -m "not (lab or nightly)" -n $(WORKERS) --dist loadgroup

# Without a daemon, a machine that boots, or a program that takes long; and without tests/slow.txt.
QUICK = not (slow or lab or nightly or root or libvirt or qemu or slurm or browser or pdf or gpu or ansible)
PATHS = tests
quick: $(CHECKS) probe
	$(BIN)/pytest -m "$(QUICK)" -n $(WORKERS) --dist worksteal $(PATHS)

# Parts: frozen fuzz kills conformance more-cases without-cluster lab. All are run with one seed, which is printed.
nightly: $(CHECKS) probe
	$(BIN)/python -m tests.nightly $(SEED:%=--seed %) $(PART:%=--part %)

gpu-check: $(CHECKS) probe
	$(BIN)/pytest -m gpu tests

bench: $(CHECKS) probe
	$(BIN)/python -m bench.plan_speed
	$(BIN)/python -m bench.host_speed
	$(BIN)/python -m bench.command_speed
	$(BIN)/python -m bench.slurm_audit_speed
	$(BIN)/python -m bench.report_speed 200
	$(BIN)/python -m bench.probe_peers 3

lock:
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --custom-compile-command "make lock" requirements.in -o requirements.lock
	# The part of it that homenode runs with and is built with, for make setup; without the latter, for
	# packages and images; and what packages and pages are built with.
	sed '/^# checks/,$$d' requirements.in | $(BIN)/uv pip compile -q --universal \
	  --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
	  --custom-compile-command "make lock" -c requirements.lock - -o packaging/setup.lock
	sed '/^# the extra/,$$d' requirements.in | $(BIN)/uv pip compile -q --universal \
	  --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
	  --custom-compile-command "make lock" -c requirements.lock - -o packaging/runtime.lock
	$(BIN)/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes \
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

# Two wheels: homenode, pure Python, and its probe. With the C++ library linked into it the probe would need glibc 2.36.
WHEEL := dist/wheel
BUILD_WHEEL = $(BIN)/python -m pip wheel --quiet --no-deps --disable-pip-version-check --no-build-isolation
wheel: $(STAMP)
	rm -rf $(WHEEL) build/probe/homenode-probe
	LDFLAGS=-s $(BUILD_PROBE) all static
	$(BUILD_WHEEL) -w $(WHEEL) . ./packaging/probe

# What packages install, from its lock, with hashes: a directory for each Python, since lxml, msgspec, PyYAML and
# MarkupSafe have a compiled module for each.
MACHINE := $(shell uname -m)
PLATFORMS := $(foreach glibc,2_17 2_24 2_26 2_28 2_34,--platform manylinux_$(glibc)_$(MACHINE)) --platform manylinux2014_$(MACHINE)
PYTHONS := 3.11 3.12 3.13 3.14
runtime: wheel
	rm -rf build/runtime
	$(foreach v,$(PYTHONS),$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  --no-deps --only-binary=:all: --python-version $(v) $(PLATFORMS) --require-hashes \
	  -r packaging/runtime.lock --target build/runtime/$(v) &&) true

deb: runtime $(TOOLS)/.ready $(CHECKS)
	$(BIN)/python -m tests.doc_tree build
	$(TOOLS)/bin/sphinx-build -q -W -t manual -b man -c packaging/docs build/docs build/man
	$(BIN)/python packaging/debian.py $(WHEEL) build/runtime build/man dist

dist: docs
	rm -f dist/homenode* dist/SHA256SUMS
	$(MAKE) --no-print-directory deb
	cp $(WHEEL)/homenode*.whl dist/
	$(BIN)/python -m hatchling build -t sdist -d dist >/dev/null
	$(PYTHON) -m venv --clear --without-pip build/installed
	$(BIN)/pip --python build/installed/bin/python install --quiet --require-hashes -r packaging/runtime.lock
	$(BIN)/pip --python build/installed/bin/python install --quiet --no-deps --no-index $(WHEEL)/homenode*.whl
	$(TOOLS)/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml \
	  --output-file dist/homenode.cdx.json build/installed/bin/python
	@if engine=$$(command -v podman || command -v docker) && $$engine info >/dev/null 2>&1; then \
	$$engine build -q -f containers/Containerfile -t homenode . && $$engine save homenode | gzip >dist/homenode-image.tar.gz; \
	else echo "no container engine runs here: no image is built"; fi
	cd dist && sha256sum homenode* > SHA256SUMS && cat SHA256SUMS

clean:
	rm -rf $(VENV) out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
