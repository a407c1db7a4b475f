"""RabbitMQ and PostgreSQL together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from testing.servers import postgres, rabbitmq


@contextmanager
def both(nodes: int) -> Iterator[tuple[rabbitmq.RabbitCluster, postgres.PostgresServer]]:
    """Yield a RabbitMQ cluster and a PostgreSQL server, both ready."""
    with ExitStack() as stack:
        rabbit, database = rabbitmq.RabbitCluster(nodes), postgres.PostgresServer()
        stack.callback(rabbit.remove)
        stack.callback(database.remove)
        rabbit.begin()  # takes seconds; PostgreSQL starts meanwhile
        database.start()
        rabbit.wait()
        yield rabbit, database
