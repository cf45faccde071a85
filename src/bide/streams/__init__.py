"""Reader of RabbitMQ streams over the stream protocol.

Unlike AMQP 0-9-1, this protocol delivers the time at which the broker stored a message.

``frames``, ``chunk`` and ``amqp10`` are the codec and do no input or output. ``connection`` is a connection to one
broker. ``log`` finds offsets and reads ranges of them.
"""
