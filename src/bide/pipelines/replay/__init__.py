"""Replay of failed messages, from an error queue or from the audit."""
