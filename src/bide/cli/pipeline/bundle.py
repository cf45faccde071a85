"""``bide pipeline bundle``: bide as one file."""

from __future__ import annotations

from pathlib import Path

import click

from bide.cli.output import print_json
from bide.cli.settings import json_option
from bide.errors import InvalidInputError


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=Path("bide.zip"))
@json_option("the path and the size")
def bundle(*, file: Path, as_json: bool) -> None:
    """Write bide into FILE, for a Spark whose executors do not have it: bide.zip, unless named.

    Hand it over by 'spark-submit --py-files', by addPyFile or, on Spark Connect, by addArtifacts(pyfile=True). It has
    bide, pamqp, and httpx2 with what that builds on; PyArrow and PySpark have to be there. The commands of 'bide
    pipeline' do all this by themselves.
    """
    from bide.spark.bundle import write_bundle

    try:
        written = write_bundle(file)
    except OSError as error:
        raise InvalidInputError(f"{file} cannot be written: {error.strerror}") from error
    size = written.stat().st_size
    if as_json:
        print_json({"path": str(written), "bytes": size})
    else:
        click.echo(f"{file}: {size / 1e6:.1f} MB")
