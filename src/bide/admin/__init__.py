"""Topologies on a broker: apply, delete, compare and verify."""
