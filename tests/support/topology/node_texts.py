"""Outputs of nvidia-smi on one host, written for these tests."""

from __future__ import annotations

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""

# Four GPUs on two NUMA nodes, two hardware threads a core, an InfiniBand adapter a pair of GPUs and a bonded Ethernet.
WITH_ADAPTERS = (
    "\x1b[4m\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tNIC2\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV4\tNV4\tNV4\tPXB\tSYS\tNODE\t0-7,16-23\t0\t\tN/A\n"
    "GPU1\tNV4\t X \tNV4\tNV4\tPIX\tSYS\tNODE\t0-7,16-23\t0\t\tN/A\n"
    "GPU2\tNV4\tNV4\t X \tNV4\tSYS\tPIX\tSYS\t8-15,24-31\t1\t\tN/A\n"
    "GPU3\tNV4\tNV4\tNV4\t X \tSYS\tPXB\tSYS\t8-15,24-31\t1\t\tN/A\n"
    "NIC0\tPXB\tPIX\tSYS\tSYS\t X \tSYS\tNODE\n"
    "NIC1\tSYS\tSYS\tPIX\tPXB\tSYS\t X \tSYS\n"
    "NIC2\tNODE\tNODE\tSYS\tSYS\tNODE\tSYS\t X \n" + LEGEND + "\nNIC Legend:\n\n"
    "  NIC0: mlx5_0\n  NIC1: mlx5_10\n  NIC2: mlx5_bond_0\n"
)

GPUS_ONLY = (
    "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPHB\t0-3\t\tN/A\nGPU1\tPHB\t X \t0-3\t\tN/A\n" + LEGEND
)

NO_AFFINITY = "\tGPU0\tGPU1\nGPU0\t X \tNV2\nGPU1\tNV2\t X \n" + LEGEND


def with_bonds(virtual: int = 34, virtual_class: str = "SYS") -> str:
    """Eight GPUs, each on a switch with a bond of its own, beside virtual functions: RoCE as clouds rent it."""
    adapters = [f"mlx5_{number}" for number in range(virtual)] + [f"mlx5_bond_{number}" for number in range(1, 9)]
    devices = [f"GPU{number}" for number in range(8)] + [f"NIC{number}" for number in range(len(adapters))]

    def cell(one: str, other: str) -> str:
        names = [adapters[int(device[3:])] if device.startswith("NIC") else device for device in (one, other)]
        if one == other:
            return " X "
        if one.startswith("GPU") and other.startswith("GPU"):
            return "NV18"
        if not all(name.startswith(("GPU", "mlx5_bond_")) for name in names):
            return virtual_class
        places = [
            int(name[3:]) if name.startswith("GPU") else int(name.removeprefix("mlx5_bond_")) - 1 for name in names
        ]
        if places[0] == places[1]:
            return "PIX"
        return "NODE" if places[0] // 4 == places[1] // 4 else "SYS"

    lines = ["\t" + "\t".join(devices) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"]
    for device in devices:
        row = "\t".join(cell(device, other) for other in devices)
        numa = int(device.startswith("GPU") and int(device[3:]) >= 4)
        lines.append(f"{device}\t{row}" + (f"\t{48 * numa}-{48 * numa + 47}\t{numa}\t\tN/A" if "GPU" in device else ""))
    names = "".join(f"  NIC{number}: {name}\n" for number, name in enumerate(adapters))
    return "\n".join(lines) + "\n" + LEGEND + "\nNIC Legend:\n\n" + names + "\n"
