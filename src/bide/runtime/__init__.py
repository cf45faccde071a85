"""Tasks, cancellation, backoff, bounded caches and loggers."""
