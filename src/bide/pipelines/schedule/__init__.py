"""Scheduling of a delayed message for each row of a table."""
