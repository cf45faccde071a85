"""Workloads, faults and the judge of ``bide check``."""
