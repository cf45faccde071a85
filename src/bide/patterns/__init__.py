"""Topologies for routing and retry patterns, as functions."""
