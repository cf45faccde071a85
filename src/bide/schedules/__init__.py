"""Schedules that can be changed: records of the schedule log, and their fold."""
