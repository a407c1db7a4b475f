"""What-if questions: explain, report, advise, simulate, sweep, and comparisons of real servers."""
