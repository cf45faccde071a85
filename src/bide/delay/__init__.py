"""Delay infrastructures: exchanges, queues and routes for delayed messages, without I/O."""
