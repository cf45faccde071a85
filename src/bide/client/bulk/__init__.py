"""Bulk publishing: a window of unconfirmed messages, and an account of what became of each."""
