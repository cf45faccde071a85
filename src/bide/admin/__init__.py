"""Putting topologies on a broker, and looking at what is there."""
