"""Outgoing messages as values, and their checks."""
