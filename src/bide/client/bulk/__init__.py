"""Bulk publishing: a window of unconfirmed messages, and the result of each message."""
