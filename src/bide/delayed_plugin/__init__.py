"""Migration from rabbitmq_delayed_message_exchange: its exchanges and waiting messages."""
