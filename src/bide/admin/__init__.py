"""Topologies and delay infrastructures on a broker: apply, delete, compare and verify."""
