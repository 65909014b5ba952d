"""Makes workloads of networks: one step on tensors without memory, watched operator by operator."""
