"""Benchmarks of bide, other clients and RabbitMQ; not part of the package."""
