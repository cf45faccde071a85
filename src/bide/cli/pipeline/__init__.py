"""Commands of ``bide pipeline``, with a module for each command, and their output."""
