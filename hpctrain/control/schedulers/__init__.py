"""Jobs of Slurm and Kubernetes: the profile of a cluster, the request, the submission, and the outcome."""
