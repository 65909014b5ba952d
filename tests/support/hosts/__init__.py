"""Hosts of this machine with links of their own."""
