# The two commands of a newcomer are `make demo` and `make test`; both make their own environment.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STORE  ?= file
export OMP_NUM_THREADS := 1

.PHONY: help demo test lint slow table bench scale soak chaos drills model simulate clean

help:
	@sed -n 's/^##//p' $(MAKEFILE_LIST)

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# Azurite comes by npm. Where it cannot be had, the tests of az:// are skipped and say so.
$(VENV)/.azurite: $(VENV)/.ready
	npm install --silent --no-audit --no-fund --prefix $(VENV)/node azurite@3.35.0 && touch $@ || \
		echo "There is no Azurite: the tests of az:// will be skipped."

# promtool comes by Debian's packages. Where it cannot be had, the tests that need it are skipped and say so.
$(VENV)/.promtool: $(VENV)/.ready
	rm -rf $(VENV)/prometheus && mkdir $(VENV)/prometheus && cd $(VENV)/prometheus && \
		apt-get download --quiet=2 prometheus && dpkg-deb --extract prometheus_*.deb . && rm prometheus_*.deb && \
		ln -sf ../prometheus/usr/bin/promtool ../bin/promtool && touch ../.promtool || \
		echo "There is no promtool: the tests of alert rules will be skipped."

## make demo           train, kill a rank during a save, resume on fewer ranks (STORE=file, s3, s3fs, gcs)
demo: $(VENV)/.ready
	$(BIN)/python -m examples.demo --store $(STORE)

## make test           lint, types, import contract and the whole suite
test: lint $(VENV)/.azurite $(VENV)/.promtool
	$(BIN)/pytest -n 4 --dist worksteal -m "not slow" $(PYTEST_ARGS)

## make lint           format, lint, types, import contract
lint: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

## make slow           the slow set: 8 ranks, a tensor of 6 GiB
slow: $(VENV)/.ready $(VENV)/.azurite
	$(BIN)/pytest -m slow $(PYTEST_ARGS)

## make table          run the conformance suite on every engine and write its table into ckptstore/objectstore/README.md
table: $(VENV)/.ready $(VENV)/.azurite
	$(BIN)/python tests/conformance/table.py

$(VENV)/.bench: $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	touch $@

## make bench          measure beside other tools, some 20 minutes on two cores; the report is benchmarks/results/REPORT.md
bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks save --size 512M
	$(BIN)/python -m benchmarks load --size 512M
	$(BIN)/python -m benchmarks stall --size 256M
	$(BIN)/python -m benchmarks small
	$(BIN)/python -m benchmarks reshard --size 128M
	$(BIN)/python -m benchmarks mlperf --profile 8b --scale 1/256 --checkpoints 2
	$(BIN)/python -m benchmarks scale
	$(BIN)/python -m benchmarks log --commits 20000
	$(BIN)/python -m benchmarks report

## make scale          plan and commit with up to 10,000 simulated ranks, and open a log of 100,000 commits
scale: $(VENV)/.bench
	$(BIN)/python -m benchmarks scale --ranks 10,100,1000,10000
	$(BIN)/python -m benchmarks log

## make soak           200 background saves, and half an hour of kills, stops, slow lines and collections: what may not grow or get lost
soak: $(VENV)/.bench
	$(BIN)/python -m benchmarks soak
	$(BIN)/python -m benchmarks endurance

## make chaos          kill the plain example at every file event of its saves, one process and two ranks: an hour on two cores
chaos: $(VENV)/.ready
	$(BIN)/python -m benchmarks chaos

## make drills         every drill on files and on four servers; the table is benchmarks/results/DRILLS.md
drills: $(VENV)/.ready
	$(BIN)/python -m benchmarks drills

## make model          explore a bounded model of the commit protocol, state by state: some minutes on one core
model: $(VENV)/.ready
	$(BIN)/python -m benchmarks model

## make simulate       play 10,000 drawn histories, every enumeration and every weakened protocol: most of an hour on two cores
simulate: $(VENV)/.ready
	$(BIN)/python -m benchmarks simulate
	-$(BIN)/python -m benchmarks faults

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
