"""Commands on a gateway's journal: explain, report and advise."""
