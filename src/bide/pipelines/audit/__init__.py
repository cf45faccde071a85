"""The audit of delayed messages: their facts in tables, refreshed from the streams of the taps."""
