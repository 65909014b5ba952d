"""Derives workloads from networks: records each operator of one training step on tensors without memory."""
