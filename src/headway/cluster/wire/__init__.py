"""Control between processes: events to the controller, commands from it. Tokens never come this way."""
