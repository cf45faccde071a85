"""Tasks, cancellation, backoff, bounded caches, loggers, and numbers with nouns."""
