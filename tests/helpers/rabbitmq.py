"""A private RabbitMQ server for tests (`private.Private`)."""

from __future__ import annotations

from testing.servers.rabbitmq import RabbitServer
from tests.helpers.private import Private

_server = Private(RabbitServer, "HEADWAY_RABBITMQ_URL")
new, private, the_url, stop = _server.new, _server.private, _server.the_url, _server.stop
