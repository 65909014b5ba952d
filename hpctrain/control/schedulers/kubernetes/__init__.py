"""Jobs of Kubernetes: manifests and what a profile says of them."""
