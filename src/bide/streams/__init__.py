"""Reader of RabbitMQ streams over the stream protocol.

Unlike AMQP 0-9-1, this protocol has the time at which a message was stored.

``frames``, ``chunk`` and ``amqp10`` are the codec and do no input or output; ``connection`` speaks with one broker,
``log`` asks for positions and reads ranges of offsets.
"""
