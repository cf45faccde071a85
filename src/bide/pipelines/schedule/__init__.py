"""Schedule of a message for each row of a table."""
