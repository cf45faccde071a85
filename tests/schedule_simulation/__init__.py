"""Real gates and clients on the in-memory broker, in virtual time, with faults."""
