"""Messaging patterns: functions that return topologies."""
