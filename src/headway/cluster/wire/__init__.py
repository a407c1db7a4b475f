"""Control messages between processes: events to the controller, commands from it, never tokens."""
