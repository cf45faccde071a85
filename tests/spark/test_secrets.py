"""The broker's password, absent from plans, pages, logs and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from pyspark.errors import PySparkException

from bide.cli.app import run
from tests.spark.receiving import new_queue
from tests.spark.streams import Streams
from tests.timeouts import TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

WRONG = "wrong-4711"


@pytest.fixture
def logged(spark: SparkSession) -> Iterator[Callable[[], str]]:
    """What Spark's JVM logs meanwhile, to the last detail."""
    jvm: Any = spark.sparkContext._jvm
    log4j = jvm.org.apache.logging.log4j
    written = jvm.java.io.StringWriter()
    layout = log4j.core.layout.PatternLayout.createDefaultLayout()
    appender = log4j.core.appender.WriterAppender.createAppender(layout, None, written, "test", False, True)
    appender.start()
    root = log4j.LogManager.getRootLogger()
    usual = list(root.getAppenders().values())
    for one in usual:
        root.removeAppender(one)
    root.addAppender(appender)
    spark.sparkContext.setLogLevel("DEBUG")
    yield written.toString
    spark.sparkContext.setLogLevel("OFF")
    root.removeAppender(appender)
    for one in usual:
        root.addAppender(one)


def pages(spark: SparkSession) -> dict[int, str]:
    """The text of Spark's pages about its last 1,000 queries, by their numbers."""
    session: Any = spark._jsparkSession
    found = session.sharedState().statusStore().executionsList()
    queries = [found.apply(index) for index in range(found.size())]
    return {query.executionId(): query.physicalPlanDescription() for query in queries}


@pytest.mark.long
@pytest.mark.slow
def test_the_password_appears_in_no_output_log_or_file(
    spark: SparkSession,
    streams: Streams,
    logged: Callable[[], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    password = urlsplit(streams.vhost.url).password
    assert password
    wrong = streams.vhost.url.replace(password, WRONG)
    streams.declare("orders")
    streams.fill("orders", ["a"])
    before = pages(spark)

    frame = streams.batch(stream="orders")
    frame.explain(True)
    assert frame.count() == 1
    sent = frame.select("value").write.format("rabbitmq").mode("append").option("queue", new_queue(streams.vhost.url))
    sent.option("url", streams.vhost.url).save()
    copied = streams.query(stream="orders", startingOffsets="earliest").select("value").writeStream.format("rabbitmq")
    copied = copied.options(queue="orders", checkpointLocation=str(tmp_path / "checkpoint")).trigger(availableNow=True)
    query = copied.option("url", streams.vhost.url).start()
    assert query.awaitTermination(int(TIMEOUT))
    query.explain(True)

    errors = []
    for use in (
        lambda: streams.batch(stream="orders", url=wrong).collect(),
        lambda: streams.batch(stream="orders", url=f"{wrong}?frames=9").collect(),
        lambda: streams.run(tmp_path / "other", tmp_path / "others", stream="orders", url=wrong),
        lambda: sent.option("url", wrong).save(),
    ):
        with pytest.raises(PySparkException) as caught:
            use()
        errors.append(str(caught.value))
    source = tmp_path / "rows.csv"
    source.write_text("order_id,due\no-1,2026-01-01\n")
    assert run(["-vv", "pipeline", "schedule", str(source), "--to", "orders", "--at-column", "due", "--json",
                "--ledger", str(tmp_path / "ledger"), "--url", wrong]) == 1  # fmt: skip

    shown = capsys.readouterr()
    plans = [text for number, text in pages(spark).items() if number not in before]
    texts = {"output": shown.out, "errors": shown.err, "raised": "\n".join(errors),
            "log of Java": logged(), "pages": "\n".join(plans)}  # fmt: skip
    for place, text in texts.items():
        assert WRONG not in text, place
        assert password not in text, place
    # It was looked for where something is said.
    assert texts["output"].count("rabbitmq") > 2
    assert "with this password" in texts["raised"]
    assert "with this password" in texts["errors"]
    assert "rabbitmq" in texts["pages"]
    assert "rabbitmq" in texts["log of Java"]
