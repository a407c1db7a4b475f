"""The dashboard at `/`: one page, and the events that keep it up to date."""
