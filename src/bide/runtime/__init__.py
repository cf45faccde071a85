"""Tasks, cancellation and logs: what running code needs, whatever it does."""
