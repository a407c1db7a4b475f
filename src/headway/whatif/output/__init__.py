"""The only writer of results: tables, JSON, plots, pages."""
