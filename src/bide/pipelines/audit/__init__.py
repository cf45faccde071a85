"""Audit of delayed messages: tables from taps, events of endpoints and the schedule log."""
