"""A FAKE engine and private RabbitMQ and PostgreSQL servers, for tests and benchmarks."""
