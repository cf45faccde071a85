# make demo and make test set up what they need; the second time that takes a fraction of a second.

PYTHON_BIN := .venv/bin/python
# Most tests wait for a broker, so more workers than cores are faster. WORKERS=0 runs one test after the other.
# tests/conftest.py sets the order of files, and which workers run Spark.
WORKERS ?= 6
PARALLEL = --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder --ignore=tests/timing
# Lateness is measured with nothing else at work; -rP prints the figures.
TIMING = $(PYTHON_BIN) -m pytest -rP tests/timing
# Of another release of PySpark: what docs/spark-cluster.md says of releases.
PYSPARK ?= 4.2.1
PYSPARK_TESTS := $(wildcard $(foreach kind,source sink registration,tests/spark/test_$(kind)*.py))
BROKER_TESTS := $(wildcard tests/broker tests/faults tests/spark) tests/acceptance/test_local_broker.py

.PHONY: help demo check test test-timing test-long test-brokers test-pyspark test-soak soak test-equivalence bench bench-docs doc-pictures lint format lock setup java browser rabbitmq iproute2 clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: setup ## watch delayed messages arrive on time, on a RabbitMQ that bide starts (or yours), and draw a report
	@scripts/install-rabbitmq.sh
	@scripts/install-java.sh || true # it says what to do; without, the demo ends before its report
	@.venv/bin/bide demo

check: lint ## lint, type-check, and run the unit tests (about a minute)
	@$(PYTHON_BIN) -m pytest --numprocesses=2 --dist=worksteal tests/unit

test: lint rabbitmq java browser ## lint, type-check, and run the tests on the installed RabbitMQ (a quarter of an hour)
	@$(PYTHON_BIN) -m pytest $(PARALLEL) -m "not long"

test-timing: setup rabbitmq ## measure how late delayed messages are, alone on the machine (a minute or two)
	@$(TIMING)

test-long: setup rabbitmq java browser iproute2 ## the tests that `test` leaves out: a night, whole clusters, more kills (seven minutes)
	@$(PYTHON_BIN) -m pytest $(PARALLEL) -m long

test-brokers: setup java browser iproute2 ## run the broker tests on RabbitMQ 4.0 and 4.3 too (Linux, as root: each needs 520 MB)
	@failed=; for suite in trixie forky; do \
		root=$$(scripts/broker-root.sh $$suite) || exit 1; \
		echo "== the RabbitMQ of $$suite"; \
		BIDE_TEST_BROKER_ROOT=$$root $(PYTHON_BIN) -m pytest $(PARALLEL) $(BROKER_TESTS) || failed="$$failed $$suite"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed on:$$failed" >&2; exit 1; fi

test-pyspark: setup java rabbitmq ## run the tests of source, sink and registration on another PySpark (PYSPARK=4.1.4; each takes 1 GB)
	@scripts/pyspark-venv.sh $(PYSPARK)
	@.venv-pyspark-$(PYSPARK)/bin/python -m pytest $(PARALLEL) $(PYSPARK_TESTS)

test-soak: setup ## cut 200 connections in the middle of bulk publishes rather than a few (eleven minutes)
	@BIDE_SOAK=1 $(PYTHON_BIN) -m pytest --override-ini=faulthandler_timeout=7200 tests/faults/test_bulk_faults.py -k random_bytes

soak: setup java ## kill Spark 500 times as it reads and writes, and count (an hour; goes on where it was ended, SOAK="--seconds 600" for less)
	@env -u BIDE_URL scripts/install-rabbitmq.sh
	@$(PYTHON_BIN) -m tests.soak $(SOAK)

bench: setup ## compare bide, other clients, and the limits of the broker (hours; BENCH="publish --scale 0.1" for less)
	@scripts/install-rabbitmq.sh
	@$(PYTHON_BIN) -m benchmarks --keep benchmarks/results $(BENCH)

bench-docs: setup ## draw docs/benchmarks.md from the newest results of each release
	@$(PYTHON_BIN) -m benchmarks $(foreach file,$(wildcard benchmarks/results/*.json),--from $(file)) --page docs >/dev/null

doc-pictures: setup java ## run a campaign of two minutes, and draw it for the pages of the pipelines (PICTURES="--from FILE" only draws)
	@env -u BIDE_URL scripts/install-rabbitmq.sh
	@$(PYTHON_BIN) -m benchmarks.doc_pictures $(PICTURES)

test-equivalence: setup ## play 2,000 made-up cases on RabbitMQ and on the broker in memory, and compare (ten minutes)
	@BIDE_SOAK=1 $(PYTHON_BIN) -m pytest --override-ini=faulthandler_timeout=7200 -rP tests/broker/test_memory_equivalence.py

lint: setup ## ruff, mypy, and the check of texts (scripts/prose.py)
	@.venv/bin/ruff check
	@.venv/bin/ruff format --check
	@.venv/bin/mypy
	@$(PYTHON_BIN) scripts/prose.py

format: setup ## let ruff format everything and fix what it can
	@.venv/bin/ruff check --fix
	@.venv/bin/ruff format

lock: ## pin the dependencies anew, newest allowed releases
	@scripts/lock.sh

setup: # .venv with the pinned packages
	@scripts/setup.sh

java: # for Spark
	@scripts/install-java.sh

browser: # for the tests of the report
	@scripts/install-chromium.sh

rabbitmq: # the tests run on a private broker, whatever BIDE_URL says
	@env -u BIDE_URL scripts/install-rabbitmq.sh

iproute2: # for the tests that cut nodes of a cluster off
	@scripts/install-iproute2.sh

clean: ## remove everything that make made, but the broker roots in the user's cache
	@rm -rf .venv .venv-pyspark-* .lock-venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist bide-demo
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
