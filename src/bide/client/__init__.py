"""The client: connections that come and go, confirmed publishing, deliveries."""
