# Two commands: `make demo` trains a decoder and a table of the study, `make test` runs the tests. Both set themselves up.
PYTHON ?= python3

# The versions of constraints.txt; with NEWEST=1 the newest that pyproject.toml allows, in an environment beside.
# Types are checked against the first alone: what numpy says of its own changes from version to version.
ifdef NEWEST
VENV := .venv-newest
CONSTRAINTS :=
else
VENV := .venv
CONSTRAINTS := --constraint constraints.txt
endif
BIN := $(VENV)/bin

# Huge pages for the buffers of the tests, as `lm run` and `lm sweep` set them for themselves.
suite test-fast test-slow test-faults test-beam soak: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

# libtpu is fetched while style is checked, and types are checked while tests run.
MAKEFLAGS += --jobs=2

MINUTES ?= 30

# Python keeps what it compiles, whatever the shell says: else each command compiles jax again, for four seconds.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo install golden test suite test-fast test-slow test-faults test-beam soak bench lint style types docs wheel clean

# TEXT=book.txt trains the decoder on a text of yours.
demo: export LM_DEMO_TEXT := $(value TEXT)
demo: $(VENV)/ready
	$(BIN)/lm demo $(if $(TEXT),--text "$$LM_DEMO_TEXT")
	@echo "To put lm on your path: . $(BIN)/activate"

# The environment alone; `demo` and `test` make it too.
install: $(VENV)/ready
	@echo "To put lm on your path: . $(BIN)/activate"

test: suite types

suite: $(VENV)/tpu style
	$(BIN)/python -m pytest -q -n 2 --dist loadscope --no-loadscope-reorder tests

# What most changes break, in under 90 seconds: layout, settings, objectives, packing, metrics, tasks, vocabularies, the patches of
# CONTRIBUTING.md, lists of what settings may name; and of what tokens see, that packed examples see only themselves, and a decoder
# what came before.
FAST := test_layout test_metrics convert/test_config_fields data/test_packing data/test_tasks experiments/study/test_registry objectives/test_objectives tokenizers/test_vocabulary docs/test_guide docs/test_lists
LAWS := "nn/test_transformer.py::test_a_packed_example_sees_only_itself_and_padding_changes_nothing[encoder-decoder]" \
	"nn/test_transformer.py::test_a_decoder_depends_on_what_came_before_and_on_all_of_it[decoder]"
test-fast: $(VENV)/ready lint
	$(BIN)/python -m pytest -q -n 2 --dist loadscope $(FAST:%=tests/%.py) $(LAWS:%=tests/%)

# What tests compare with: names of settings for type checkers, rows and options, bytes of batches, pages of papers.
golden: $(VENV)/ready
	$(BIN)/python tests/golden/make_setting_paths.py
	$(BIN)/python tests/golden/make_study.py
	$(BIN)/python tests/golden/make_batches.py
	$(BIN)/python docs/paper_pages.py

# What belongs to the project: beside it lie your scripts and exported models.
LINTED := lm experiments launch tests docs README.md CHANGELOG.md CONTRIBUTING.md AGENTS.md
lint: style types

style: $(VENV)/ready
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)

types: $(VENV)/ready
	$(if $(NEWEST),,$(BIN)/mypy)

# Proofs take as long as they take: without the limits of pyproject.toml for one test.
UNLIMITED := -o timeout=0 -o faulthandler_timeout=0
test-slow: $(VENV)/tpu
	$(BIN)/python -m pytest -q -m slow $(UNLIMITED) tests

# What a run survives, dealt out in under half an hour; the results are written to tests/faults/README.md.
test-faults: $(VENV)/tpu
	$(BIN)/python tests/faults/run.py

# `lm data clean` on Apache Beam, in an environment of its own: Beam takes older versions of four packages.
test-beam:
	$(MAKE) VENV=.venv-beam .venv-beam/beam
	.venv-beam/bin/python -m pytest -q tests/c4/test_beam.py tests/c4/test_crawl.py

$(VENV)/beam: $(VENV)/ready constraints-beam.txt
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --constraint constraints-beam.txt --editable '.[beam]'
	@touch $@

# A row and its baseline, swept with a random fault about every minute, come to what they do without.
soak: $(VENV)/ready
	$(BIN)/python tests/faults/soak.py $(MINUTES)

# Training and writing beside transformers, in turns: half an hour on an idle machine; docs/speed.md has its tables.
# With an environment that has torch and transformers: make bench TORCH=its/bin/python
TORCH ?= .venv-bench/bin/python
bench: $(VENV)/ready $(filter .venv-bench/bin/python,$(TORCH))
	$(BIN)/python tests/bench/training.py --torch $(TORCH)
	$(BIN)/python tests/bench/decoding.py --torch $(TORCH)

.venv-bench/bin/python: pyproject.toml
	$(MAKE) VENV=.venv-bench .venv-bench/ready
	VIRTUAL_ENV=.venv-bench .venv-bench/bin/uv pip install --quiet --editable '.[bench]'

# The site of docs/, in dist/site, without network; fails on a broken link.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/docs: $(VENV)/ready
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet $(CONSTRAINTS) --editable '.[docs]'
	@touch $@

wheel: $(VENV)/ready
	$(BIN)/uv build --quiet --out-dir dist .

# uv installs in seconds what pip installs in minutes; it comes from the same index that pip uses.
$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "PYTHON=$(PYTHON) does not run here, or is older than 3.11; name another with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) uv
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet $(CONSTRAINTS) --editable '.[test]'
	@touch $@

# The compiler for TPUs, with which tests (and `lm plan`) compile for slices that nobody has to own; only for Linux.
$(VENV)/tpu: $(VENV)/ready
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
	  VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet $(CONSTRAINTS) --editable '.[test,tpu]'; fi
	@touch $@

clean:
	rm -rf $(VENV) .venv-newest .venv-beam .venv-bench dist build *.egg-info
