"""The command line, `headway`."""
