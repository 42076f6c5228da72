# Two commands do everything on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --disable-pip-version-check --constraint constraints.txt
ARGS ?=
# One more than the two cores of a small machine: while a test waits for its server, there is another one to run.
WORKERS ?= 3
DRAFT_ARGS ?=

.PHONY: install serve test lint types imports check docs reference diagram pictures train-demo train-demo-draft train-demo-drafter train-demo-hybrid bench figures clean

install: .venv/develops  ## set up .venv with rekindle and what its tests and benchmarks need

.venv/serves: pyproject.toml constraints.txt hatch_build.py $(wildcard adapters/models/kernels/cpu/native/*.[ch])
	@echo 'Setting up .venv: torch first, which is large, then the rest; once, for some minutes.'
	$(PYTHON) -m venv .venv
	$(PIP) torch
	@echo 'Compiling the CPU kernels, which prints nothing for a minute or two, and installing the rest.'
	$(PIP) --editable .
	@touch $@

.venv/develops: .venv/serves
	@echo 'Adding linters, test tools and plotting to .venv.'
	$(PIP) --editable '.[dev]'
	@touch $@

serve: .venv/serves  ## serve the demo model on 127.0.0.1:8000; ARGS="..." adds options
	@exec $(BIN)/rekindle serve $(ARGS)

test: install  ## the whole suite, in WORKERS processes; ARGS="-k name" picks from it, ARGS="-n 0 --pdb" stops where it fails
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports

check: lint types imports test  ## what CI runs

docs: .venv/documents  ## the documentation as a site, in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

.venv/documents: .venv/serves
	$(PIP) --editable '.[docs]'
	@touch $@

reference: install  ## write docs/REFERENCE.md anew
	$(BIN)/python -m tests.docs.reference

pictures: install  ## draw the documentation's pictures anew; needs Chromium
	$(BIN)/python -m tests.pictures

diagram: install  ## write docs/STATES.md and its picture anew
	$(BIN)/rekindle diagram --markdown > docs/STATES.md
	$(BIN)/python -m tests.docs.states_picture

train-demo-hybrid: install .train/packages  ## train the hybrid demo and its own head again, from nothing; needs a CUDA device
	$(BIN)/python -m training.hybrid $(ARGS)

bench: install  ## record the benchmarks that need no GPU; takes a while
	$(BIN)/python -m benchmarks.engine_fold --record
	$(BIN)/python -m benchmarks.engine_overhead --record
	$(BIN)/python -m benchmarks.cpu_model --record
	$(BIN)/python -m benchmarks.exactness --record
	$(BIN)/python -m benchmarks.startup --record
	$(BIN)/python -m benchmarks.restart --record
	$(BIN)/python -m benchmarks.store_index --record
	$(BIN)/python -m benchmarks.scope_windows --record

figures: install  ## make docs/BENCHMARKS.md and the README's chart from benchmarks/results
	$(BIN)/python -m benchmarks.report
	$(BIN)/python -m benchmarks.chart

.train/packages: training/corpus.txt install  ## what the corpus reads and nothing else needs
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --upgrade --target $@ -r $<

train-demo: install .train/packages  ## train the demo model, its draft and its drafter again, from nothing; needs a CUDA device
	$(BIN)/python -m training.demo $(ARGS)
	$(BIN)/python -m training.draft $(DRAFT_ARGS)
	$(BIN)/python -m training.drafter $(DRAFTER_ARGS)

train-demo-draft: install  ## train the demo model's draft again, for the demo model as it is; needs a CUDA device
	$(BIN)/python -m training.draft $(ARGS)

train-demo-drafter: install .train/packages  ## train what scores prompts for the demo model again, from nothing; needs a CUDA device
	$(BIN)/python -m training.drafter $(ARGS)

clean:
	rm -rf .venv
