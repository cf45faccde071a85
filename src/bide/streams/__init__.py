"""Reader and publisher of RabbitMQ streams over the stream protocol.

Unlike AMQP 0-9-1, this protocol delivers the time at which the broker stored a message, and has deduplication: the
broker drops messages that a publisher sends again.

``frames``, ``chunk``, ``amqp10`` and ``amqp10_encoder`` are the codec and do no input or output. ``connection`` is a
connection to one broker. ``log`` finds offsets, ``range_reader`` reads ranges of them, and ``publisher`` writes.
"""
