"""The gate and the client on the in-memory broker, in virtual time, with everything that can go wrong."""
