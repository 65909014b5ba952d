"""What every process of the tests begins with; this folder is on their PYTHONPATH."""
