"""What can be wrong with a cluster before a job burns its hours: one check a function, from facts that a host tells."""
