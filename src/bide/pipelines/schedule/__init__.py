"""Scheduling the rows of a table."""
