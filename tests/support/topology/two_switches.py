"""A Slurm topology of four hosts under two switches, and ``nvidia-smi topo -m`` of one with two GPUs."""

from __future__ import annotations

TREE = "SwitchName=core Switches=s[1-2]\nSwitchName=s1 Nodes=n[1,3]\nSwitchName=s2 Nodes=n[2,4]\n"
NODE = """\
\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV4\tPIX\tSYS\t0-3\t0\tN/A
GPU1\tNV4\t X \tSYS\tPIX\t4-7\t1\tN/A
NIC0\tPIX\tSYS\t X \tSYS
NIC1\tSYS\tPIX\tSYS\t X

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
