"""What runs on a login node: plans, placements, launches, jobs, predictions. It imports no framework and no MPI."""
