"""A model of the schedule log: random histories, planted faults, and a judge."""
