"""AMQP 0-9-1: addresses, encoding, connections and channels."""
