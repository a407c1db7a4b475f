"""RabbitMQ and PostgreSQL for one benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from testing.servers import postgres, rabbitmq


@contextmanager
def both(nodes: int) -> Iterator[tuple[rabbitmq.RabbitCluster, postgres.PostgresServer]]:
    """Yield a RabbitMQ cluster of so many nodes and a PostgreSQL server; both answer."""
    with ExitStack() as stack:
        rabbit, database = rabbitmq.RabbitCluster(nodes), postgres.PostgresServer()
        stack.callback(rabbit.remove)
        stack.callback(database.remove)
        rabbit.begin()  # takes seconds, in which the other one starts
        database.start()
        rabbit.wait()
        yield rabbit, database
