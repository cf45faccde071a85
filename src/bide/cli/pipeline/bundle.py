"""``bide pipeline bundle``: write bide as one zip file."""

from __future__ import annotations

from pathlib import Path

import click

from bide.cli.output import echo, print_json
from bide.cli.settings import json_option
from bide.errors import InvalidInputError


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=Path("bide.zip"))
@json_option("the path and the size")
def bundle(*, file: Path, as_json: bool) -> None:
    """Write bide as a zip file, for Spark executors without an installation of bide. FILE is bide.zip by default.

    Pass the file with 'spark-submit --py-files', with addPyFile or, on Spark Connect, with addArtifacts(pyfile=True).
    The file contains bide and its dependencies in pure Python. PyArrow and PySpark have to be installed on the
    executors. The commands of 'bide pipeline' send such a file themselves.
    """
    from bide.spark.bundle import write_bundle

    try:
        written = write_bundle(file)
    except OSError as error:
        raise InvalidInputError(f"{file} cannot be written: {error.strerror}; name another file") from error
    size = written.stat().st_size
    if as_json:
        print_json({"path": str(written), "bytes": size})
    else:
        echo(f"{file}: {size / 1e6:.1f} MB")
