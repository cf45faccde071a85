"""``bide pipeline``: its commands, a module each, and what they print."""
