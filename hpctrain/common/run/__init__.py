"""The run directory: the plan, the events and the records, which the launcher and the ranks share."""
