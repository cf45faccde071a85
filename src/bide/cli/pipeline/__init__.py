"""Commands of ``bide pipeline``, with a module each, and their output."""
