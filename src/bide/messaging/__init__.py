"""Ready-made messaging patterns: RPC, event bus, ordered partitions, wire tap."""
