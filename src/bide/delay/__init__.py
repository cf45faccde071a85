"""Delay infrastructures: pure descriptions of exchanges and queues that hold messages back."""
