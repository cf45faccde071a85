"""Conversations ready to use: request and reply, an event bus, partitions, a wire tap."""
