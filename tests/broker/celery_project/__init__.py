"""A Celery project with ten kinds of delayed tasks: its tasks, and its checks."""
