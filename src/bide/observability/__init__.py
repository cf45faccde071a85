"""What endpoints do, for Prometheus and for OpenTelemetry."""
