"""Workloads of ``bide check``, each with its own messages, targets and processes."""
