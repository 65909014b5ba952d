"""Turns a request, the hosts and the machine into a plan."""
