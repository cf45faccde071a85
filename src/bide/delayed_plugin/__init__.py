"""Leaving rabbitmq_delayed_message_exchange: its exchanges, and the messages that wait in it."""
