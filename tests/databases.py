"""Private database servers for tests: on loopback, with data in a temporary folder."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import trustme

from tests.ports import held_port
from tests.timeouts import TIMEOUT

MYSQLD_VARIABLE = "BIDE_TEST_MYSQLD"

_numbers = count(1)


@dataclass
class DatabaseServer:
    """A running server.

    Attributes:
        scheme: the scheme of its URLs.
        admin: a URL of a user who may create databases.
    """

    scheme: str
    admin: str
    connect: Callable[[str], Any] = field(repr=False)

    def new_database(self) -> str:
        """Create an empty database, and return its URL."""
        name = f"test_{os.getpid()}_{next(_numbers)}"
        self.execute(self.admin, f"CREATE DATABASE {name}")
        return f"{self.admin.rpartition('/')[0]}/{name}"

    def execute(self, url: str, statement: str, rows: list[tuple[Any, ...]] | None = None) -> list[tuple[Any, ...]]:
        """Run a statement, once for each row of values if there are any, and return the result."""
        connection = self.connect(url)
        try:
            cursor = connection.cursor()
            if rows is None:
                cursor.execute(statement)
                found = list(cursor.fetchall()) if cursor.description else []
            else:
                cursor.executemany(statement, rows)
                found = []
            connection.commit()
            return found
        finally:
            connection.close()


@contextmanager
def postgresql_server() -> Iterator[DatabaseServer]:
    """A private PostgreSQL.

    It refuses to run as root, so root starts it as the user of its package.
    """
    homes = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda one: float(one.parent.name))
    found = shutil.which("postgres")
    assert homes or found, "PostgreSQL is not installed: run scripts/install-postgresql.sh"
    binaries = homes[-1] if homes else Path(str(found)).parent
    with _folder("postgres") as (folder, user), held_port() as port:
        data = folder / "data"
        setup = [binaries / "initdb", "-D", data, "-U", "bide", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        _run(setup, user)
        options = ["-c", "listen_addresses=127.0.0.1", "-c", f"port={port}", "-c", "fsync=off"]
        server = [binaries / "postgres", "-D", data, *options, "-c", f"unix_socket_directories={folder}"]
        url = f"postgresql://bide@127.0.0.1:{port}/postgres"
        # Without autocommit, CREATE DATABASE fails.
        connect = partial(psycopg.connect, autocommit=True)
        with _running(server, user, folder / "log", lambda: connect(url).close(), signal.SIGINT):
            yield DatabaseServer("postgresql", url, connect)


@contextmanager
def mysql_server(authority: trustme.CA | None = None) -> Iterator[DatabaseServer]:
    """A private MariaDB, or the MySQL whose program ``BIDE_TEST_MYSQLD`` names.

    Args:
        authority: signs a certificate for 127.0.0.1. Without it MariaDB has no TLS, and MySQL has a certificate that it
            signed itself.
    """
    with _folder("mysql") as (folder, user), held_port() as port:
        data = folder / "data"
        options = ["--bind-address=127.0.0.1", f"--port={port}", f"--socket={folder}/socket", f"--datadir={data}"]
        options += ["--innodb-flush-log-at-trx-commit=0", "--skip-log-bin", "--max-allowed-packet=64M"]
        if server := os.environ.get(MYSQLD_VARIABLE):
            setup = [server, "--no-defaults", "--initialize-insecure", f"--datadir={data}"]
            # It would listen on a second port, and read and write files in a folder that packages create.
            options += ["--mysqlx=OFF", "--secure-file-priv=NULL"]
        else:
            server = shutil.which("mariadbd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
            install = shutil.which("mariadb-install-db")
            assert server, "MariaDB is not installed: run scripts/install-mariadb.sh"
            assert install, "MariaDB is not installed: run scripts/install-mariadb.sh"
            setup = [install, "--no-defaults", f"--datadir={data}", "--auth-root-authentication-method=normal"]
        _run(setup, user)
        if authority is not None:
            certificate = authority.issue_cert("127.0.0.1")
            for name, pem in (("cert", certificate.cert_chain_pems[0]), ("key", certificate.private_key_pem)):
                pem.write_to_path(str(folder / f"{name}.pem"))
                shutil.chown(folder / f"{name}.pem", user or os.geteuid())
                options.append(f"--ssl-{name}={folder}/{name}.pem")
        url = f"mysql://root@127.0.0.1:{port}/mysql"

        def connect(url: str) -> Any:
            # The mode of MariaDB. That of MySQL refuses dates with a month or day of zero.
            return pymysql.connect(
                host="127.0.0.1",
                port=port,
                user="root",
                database=url.rpartition("/")[2],
                sql_mode="STRICT_TRANS_TABLES",
            )

        with _running(
            [server, "--no-defaults", *options], user, folder / "log", lambda: connect(url).close(), signal.SIGTERM
        ):
            yield DatabaseServer("mysql", url, connect)


@contextmanager
def _folder(user: str) -> Iterator[tuple[Path, str | None]]:
    """A temporary folder, and the user who owns it; None for the present user."""
    owner: str | None = None
    if os.geteuid() == 0:
        try:
            pwd.getpwnam(user)
            owner = user
        except KeyError:
            owner = "daemon"
    folder = Path(tempfile.mkdtemp(prefix="bide-database-"))
    try:
        if owner is not None:
            shutil.chown(folder, owner)
        yield folder, owner
    finally:
        shutil.rmtree(folder)


@contextmanager
def _running(
    command: list[Any], user: str | None, log: Path, check: Callable[[], None], end: signal.Signals
) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen([str(one) for one in command], stdout=output, stderr=output, cwd="/", user=user)
    try:
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                check()
                break
            except (psycopg.Error, pymysql.MySQLError):
                assert process.poll() is None, log.read_text(errors="replace")[-2000:]
                assert time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
                time.sleep(0.1)  # a server that starts gives no event
        yield
    finally:
        process.send_signal(end)
        try:
            process.wait(TIMEOUT)
        finally:
            process.kill()


def _run(command: list[Any], user: str | None) -> None:
    done = subprocess.run(
        [str(one) for one in command], capture_output=True, text=True, timeout=TIMEOUT, check=False, cwd="/", user=user
    )
    assert done.returncode == 0, done.stdout + done.stderr
