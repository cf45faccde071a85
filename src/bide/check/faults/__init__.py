"""Faults of a cluster that bide started, each with its repair."""
