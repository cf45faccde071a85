"""Schedules that can be changed: records of the schedule log, and the state that follows from them."""
