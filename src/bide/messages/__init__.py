"""Messages to be sent, as values, and their checks."""
