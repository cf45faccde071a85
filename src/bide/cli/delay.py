"""``bide delay``: the delay infrastructure of a broker."""

from __future__ import annotations
import click


@click.group()
def delay() -> None:
    """x"""
