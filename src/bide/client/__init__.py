"""The client: reconnecting connections, confirmed publishing, consuming."""
