"""Finds faults of a cluster before a job wastes its hours: each check is a function of facts about a host."""
