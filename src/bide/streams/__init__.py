"""Reading RabbitMQ streams by the stream protocol, which tells when a message was stored; AMQP 0-9-1 does not.

``frames``, ``chunk`` and ``amqp10`` are the codec and do no input or output; ``connection`` speaks with one broker,
``log`` asks for positions and reads ranges of offsets.
"""
