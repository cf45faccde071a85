"""Recovery from failed handlers: retry decisions, and the headers that record failures."""
