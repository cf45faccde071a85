"""Audit of delayed messages: tables that are refreshed from the streams of taps and events."""
