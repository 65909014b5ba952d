"""A package beside a script."""
