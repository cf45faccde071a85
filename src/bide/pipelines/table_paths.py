"""Paths of tables with versions, which libraries make URLs of."""

from __future__ import annotations

from bide.errors import InvalidInputError


def check_path(folder: str, table_format: str, forbidden: str) -> None:
    """Check that tables can be in a folder.

    Args:
        table_format: the name of the format, for the error.
        forbidden: characters that the library of the format does not support. It supports no unprintable ones either.

    Raises:
        InvalidInputError: the path has such a character.
    """
    for character in folder:
        if character in forbidden or not character.isprintable():
            raise InvalidInputError(
                f"{table_format} tables cannot be in {folder!r}, because its path has {character!r}: "
                "name another folder"
            )
