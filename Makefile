# Targets set up what they need. If that is done already, it takes a fraction of a second.

PYTHON_BIN := .venv/bin/python
# Containers often set it. The tests start hundreds of Pythons, which would each compile bide and the tests again.
unexport PYTHONDONTWRITEBYTECODE
# Most tests wait for a broker, so more workers than cores are faster. WORKERS=0 runs one test after the other.
# tests/conftest.py sets the order of files, and which workers run Spark.
WORKERS ?= 6
PARALLEL = --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder --ignore=tests/timing
# Lateness is measured without other load; -rP prints the figures.
TIMING = $(PYTHON_BIN) -m pytest -rP tests/timing
# Another release of PySpark; see docs/spark-cluster.md.
PYSPARK ?= 4.2.1
PYSPARK_TESTS := $(wildcard $(foreach kind,source sink registration,tests/spark/test_$(kind)*.py))
BROKER_TESTS := $(wildcard tests/broker tests/faults tests/spark) tests/acceptance/test_local_broker.py
FRAMEWORK_TESTS := $(foreach name,celery_adapter dramatiq faststream taskiq,tests/broker/test_$(name).py)

# Runs tests on both roots of scripts/broker-root.sh, though the first one may fail.
define on_newer_brokers
failed=; for suite in trixie forky; do \
	root=$$(scripts/broker-root.sh $$suite) || exit 1; \
	echo "== the RabbitMQ of $$suite"; \
	BIDE_TEST_BROKER_ROOT=$$root $(PYTHON_BIN) -m pytest $(PARALLEL) $(1) || failed="$$failed $$suite"; \
done; \
if [ -n "$$failed" ]; then echo "failed on:$$failed" >&2; exit 1; fi
endef

.PHONY: help docs docs-versions diagrams demo check checked byte-code unit-tests test test-timing test-long test-slowed test-brokers test-frameworks test-pyspark test-soak test-moving soak race test-equivalence bench bench-docs doc-pictures console-pictures lint format lock setup java browser firefox pngquant inter rabbitmq iproute2 databases languages go pythons clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: setup ## send delayed messages on a private RabbitMQ (or that of BIDE_URL), and draw a report of their lateness
	@scripts/install-rabbitmq.sh
	@scripts/install-java.sh || true # without Java, the demo ends before its report
	@.venv/bin/bide demo

check: setup ## lint, type-check, and run the unit tests with fewer generated examples (a minute)
	@$(MAKE) --no-print-directory --jobs=2 lint unit-tests

unit-tests: setup # beside lint, whose mypy uses one core only
	@$(PYTHON_BIN) -m pytest --numprocesses=2 --dist=worksteal --hypothesis-profile=quick -m "not long" \
		tests/unit

test: checked rabbitmq java browser databases languages ## lint, type-check, and run the tests on the installed RabbitMQ (a quarter of an hour)
	@$(PYTHON_BIN) -m pytest $(PARALLEL) -m "not long"

checked: setup
	@$(MAKE) --no-print-directory --jobs=2 lint byte-code

# Beside lint, whose mypy uses one core only. In a new checkout, each worker would compile all tests at the same time.
byte-code: setup
	@$(PYTHON_BIN) -m pytest --collect-only -qq >/dev/null || true # the workers report errors

test-timing: setup rabbitmq ## measure the lateness of delayed messages, without other load (two minutes)
	@$(TIMING)

# These start JVMs and clusters of their own. Spark gives a Python worker ten seconds to start, however busy the machine.
test-long: WORKERS = 3
test-long: setup rabbitmq java browser firefox iproute2 databases languages go diagrams ## run the tests that `test` leaves out: a night, clusters, more kills (half an hour)
	@$(PYTHON_BIN) -m pytest $(PARALLEL) -m long

test-brokers: setup java browser iproute2 databases languages go ## run the broker tests on RabbitMQ 4.0 and 4.3 (Linux, root, 520 MB each)
	@$(call on_newer_brokers,$(BROKER_TESTS))

# It finds races in tests, one in a few runs each. More workers, because tests wait more.
test-slowed: WORKERS = 8
test-slowed: setup rabbitmq java browser databases languages ## run the tests that use a broker with its answers held up at random (a quarter of an hour)
	@PYTHONPATH=$(CURDIR)/tests/slowed $(PYTHON_BIN) -m pytest $(PARALLEL) -m "not long" $(filter-out tests/acceptance/%,$(BROKER_TESTS)) tests/acceptance

test-frameworks: setup rabbitmq ## run the tests of Celery, dramatiq, FastStream and taskiq on RabbitMQ 3.10, 4.0 and 4.3 (as test-brokers)
	@$(PYTHON_BIN) -m pytest $(PARALLEL) $(FRAMEWORK_TESTS)
	@$(call on_newer_brokers,$(FRAMEWORK_TESTS))

test-pyspark: setup java rabbitmq ## run tests of source, sink and registration on another PySpark (PYSPARK=4.1.4; 1 GB each)
	@scripts/pyspark-venv.sh $(PYSPARK)
	@.venv-pyspark-$(PYSPARK)/bin/python -m pytest $(PARALLEL) $(PYSPARK_TESTS)

test-soak: setup ## cut connections in 200 bulk publishes, where `test` does so in a few (eleven minutes)
	@BIDE_SOAK=1 $(PYTHON_BIN) -m pytest --override-ini=faulthandler_timeout=7200 tests/faults/test_bulk_faults.py -k random_bytes

test-moving: TIMEOUTS = 1000000
test-moving: MESSAGES = 100000
test-moving: KILLED = $(PYTHON_BIN) -m pytest --override-ini=faulthandler_timeout=36000 -m long
test-moving: setup rabbitmq databases ## kill migrations of 1,000,000 timeouts, of as many in the plugin if it is there, and of 100,000 messages (hours)
	@BIDE_TEST_NUMBER=$(TIMEOUTS) $(KILLED) tests/acceptance/test_timeouts_cli.py
	@BIDE_TEST_NUMBER=$(MESSAGES) $(KILLED) tests/acceptance/test_migration_cli.py tests/acceptance/test_schedule_transfer_cli.py
	@BIDE_TEST_NUMBER=$(TIMEOUTS) $(KILLED) tests/acceptance/test_migrate_plugin.py -k many_pending

soak: setup java ## kill Spark 500 times while it reads and writes (an hour; continues after an interruption; SOAK="--seconds 600")
	@env -u BIDE_URL scripts/install-rabbitmq.sh
	@$(PYTHON_BIN) -m tests.soak $(SOAK)

race: setup ## cancel and replace 200,000 schedules as they are delivered; kill gates, clients and broker (RACE="--operations 5000")
	@env -u BIDE_URL scripts/install-rabbitmq.sh
	@$(PYTHON_BIN) -m tests.schedule_race $(RACE)

docs: setup diagrams ## build the documentation site in build/docs/html
	@$(PYTHON_BIN) scripts/build_docs.py

docs-versions: setup diagrams ## build the sites of all release tags and of this checkout in build/docs/versions (a minute each)
	@$(PYTHON_BIN) scripts/docs_versions.py

bench: setup ## compare bide, other clients, and the limits of the broker (hours; BENCH="publish --scale 0.1")
	@scripts/install-rabbitmq.sh
	@$(PYTHON_BIN) -m benchmarks --keep benchmarks/results $(BENCH)

bench-docs: setup ## write docs/benchmarks.md from the newest results of each release
	@$(PYTHON_BIN) -m benchmarks $(foreach file,$(wildcard benchmarks/results/*.json),--from $(file)) --page docs >/dev/null

doc-pictures: setup java ## draw the pictures of the pipeline pages from a run of two minutes (PICTURES="--from FILE" only draws)
	@env -u BIDE_URL scripts/install-rabbitmq.sh
	@$(PYTHON_BIN) -m benchmarks.doc_pictures $(PICTURES)

console-pictures: setup browser pngquant inter ## take the pictures of docs/console.md (twenty minutes)
	@env -u BIDE_URL scripts/install-rabbitmq.sh
	@$(PYTHON_BIN) -m benchmarks.console_pictures $(PICTURES)

test-equivalence: setup ## compare RabbitMQ and the in-memory broker on 2,000 generated cases (ten minutes)
	@BIDE_SOAK=1 $(PYTHON_BIN) -m pytest --override-ini=faulthandler_timeout=7200 -rP tests/broker/test_memory_equivalence.py

lint: setup ## run ruff, mypy, and the check of texts (scripts/prose.py)
	@.venv/bin/ruff check
	@.venv/bin/ruff format --check
	@.venv/bin/mypy
	@$(PYTHON_BIN) scripts/prose.py

format: setup ## format the code and fix lint errors with ruff
	@.venv/bin/ruff check --fix
	@.venv/bin/ruff format

lock: ## pin the newest allowed releases of the dependencies
	@scripts/lock.sh

setup: # .venv with the pinned packages
	@scripts/setup.sh

java: setup # for Spark
	@scripts/install-java.sh
	@$(PYTHON_BIN) -m tests.spark.class_archive

pythons: # for the test of the wheel
	@scripts/install-pythons.sh

diagrams: # for the documentation site
	@scripts/install-mermaid.sh

browser: # for the tests of the report
	@scripts/install-chromium.sh

firefox: # for a test of the console
	@scripts/install-firefox.sh

rabbitmq: # the tests use a private broker and ignore BIDE_URL
	@env -u BIDE_URL scripts/install-rabbitmq.sh

pngquant: # for the pictures of the console
	@scripts/install-pngquant.sh

inter: # the font of these pictures
	@scripts/install-inter.sh

iproute2: # for the tests that partition a cluster
	@scripts/install-iproute2.sh

databases: # for the tests of bide timeouts
	@scripts/install-postgresql.sh
	@scripts/install-mariadb.sh

languages: # for the tests of examples/wire
	@scripts/install-node.sh
	@scripts/install-npm-packages.sh
	@scripts/install-java-client.sh

go: # for the tests of examples/wire/go
	@scripts/install-go.sh

clean: ## remove everything that make created, except the broker roots in the user's cache
	@rm -rf .venv .venv-pyspark-* .lock-venv .mermaid .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist bide-demo examples/wire/node/node_modules
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
