"""What tests and benchmarks share: a FAKE engine, and private servers of RabbitMQ and PostgreSQL."""
