"""The SLO schedulers of other papers, each by its own published rule, as packers beside the default one."""
