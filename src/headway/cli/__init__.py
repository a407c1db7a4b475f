"""The command `headway`."""
