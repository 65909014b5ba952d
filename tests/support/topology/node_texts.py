"""Outputs of one host, written for these tests in the tools' formats."""

from __future__ import annotations

from collections.abc import Sequence

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

# A dump of NCCL: a switch below a switch, GPUs joined directly and by NVSwitches, Ethernet beside InfiniBand.
NCCL_DUMP = """<system version="1">
  <cpu host_hash="0x1" numaid="0" affinity="00000000,000f000f" arch="x86_64">
    <pci busid="0000:16:00.0" class="0x060400" vendor="0x1000" link_speed="16.0 GT/s PCIe" link_width="16">
      <pci busid="0000:18:00.0" class="0x030200" vendor="0x10de" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="1" sm="80" rank="1" gdr="1">
          <nvlink target="0000:b8:00.0" count="2" tclass="0x030200"/>
          <nvlink target="0000:07:00.0" count="4" tclass="0x068000"/>
          <nvlink target="0000:08:00.0" count="4" tclass="0x068000"/>
          <nvlink target="0000:04:01.0" count="9" tclass="0x068001"/>
        </gpu>
      </pci>
      <pci busid="0000:17:00.0" class="0x060400" vendor="0x1000" link_speed="" link_width="16">
        <pci busid="0000:19:00.0" class="0x020700" vendor="0x15b3" link_speed="" link_width="16">
          <nic>
            <net name="mlx5_0" dev="0" speed="200000" port="1" guid="0x1" maxconn="131072" gdr="1"/>
            <net name="mlx5_0" dev="1" speed="200000" port="2" guid="0x2" maxconn="131072" gdr="1"/>
          </nic>
        </pci>
      </pci>
    </pci>
    <pci busid="0000:27:00.0" class="0x020000" vendor="0x15b3" link_speed="" link_width="8">
      <nic><net name="mlx5_1" dev="2" speed="25000" port="1" guid="0x3" maxconn="131072" gdr="0"/></nic>
    </pci>
    <nic><net name="eth0" dev="3" speed="10000" port="0" guid="0x0" maxconn="65536" gdr="0"/></nic>
  </cpu>
  <cpu host_hash="0x1" numaid="1" affinity="00000000,00f000f0" arch="x86_64">
    <pci busid="0000:b8:00.0" class="0x030200" vendor="0x10de" link_speed="" link_width="16">
      <gpu dev="0" sm="80" rank="0" gdr="1">
        <nvlink target="0000:18:00.0" count="2" tclass="0x030200"/>
        <nvlink target="0000:07:00.0" count="3" tclass="0x068000"/>
      </gpu>
    </pci>
  </cpu>
</system>
"""


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


# Bus, name, state of the port, PCI class, and where they matter vendor and model and what else is told of ports.
ADAPTERS = (("12", "mlx5_0", 4), ("13", "mlx5_1", 1), ("14", "mlx5_2", 4, "0200"))


def port_lid(lid: int, port: int = 1) -> str:
    return f'<info name="Port{port}LID" value="{lid:#x}"/><info name="Port{port}LMC" value="0"/>'


def hwloc_export(version: str, adapters: Sequence[tuple[str, str, int, *tuple[str, ...]]] = ADAPTERS) -> str:
    """One package with two cores of two threads, a GPU and adapters of one switch: two InfiniBand, one Ethernet."""
    openfabrics = {"2": 3, "3": 32}[version[0]]

    def core(index: int, first: int, second: int) -> str:
        mask = 1 << first | 1 << second
        threads = "".join(f'<object type="PU" os_index="{i}" cpuset="{1 << i:#010x}"/>' for i in (first, second))
        return f'<object type="Core" os_index="{index}" cpuset="{mask:#010x}" nodeset="0x1">{threads}</object>'

    def adapter(bus: str, name: str, state: int, kind: str = "0207", model: str = "15b3:101b", infos: str = "") -> str:
        return f"""<object type="Bridge" bridge_type="1-1" pci_busid="0000:11:{bus}.0">
          <object type="PCIDev" pci_busid="0000:{bus}:00.0" pci_type="{kind} [{model}] [15b3:0007] 00">
            <object type="OSDev" name="ib{bus}" osdev_type="{2 if openfabrics == 3 else 16}"/>
            <object type="OSDev" name="{name}" osdev_type="{openfabrics}">
              <info name="NodeGUID" value="0c42:a103:0001:0001"/><info name="Port1State" value="{state}"/>{infos}
            </object>
          </object>
        </object>"""

    return f"""<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="{version}">
  <object type="Machine" os_index="0" cpuset="0x0000000f" nodeset="0x1" gp_index="1">
    <object type="Package" os_index="0" cpuset="0x0000000f" nodeset="0x1" gp_index="2">
      <object type="NUMANode" os_index="0" cpuset="0x0000000f" nodeset="0x1" gp_index="3" local_memory="1024"/>
      {core(0, 0, 2)}{core(1, 1, 3)}
      <object type="Bridge" bridge_type="0-1" bridge_pci="0000:[0f-1f]">
        <object type="Bridge" bridge_type="1-1" pci_busid="0000:0f:00.0">
        <object type="Bridge" bridge_type="1-1" pci_busid="0000:10:00.0">
          {"".join(adapter(*each) for each in adapters)}
          <object type="Bridge" bridge_type="1-1" pci_busid="0000:11:0f.0">
            <object type="PCIDev" pci_busid="0000:15:00.0" pci_type="0302 [10de:20b0] [10de:144e] a1"/>
          </object>
        </object>
        </object>
        <object type="PCIDev" pci_busid="0000:1f:00.0" pci_type="0300 [1a03:2000] [1a03:2000] 41"/>
      </object>
    </object>
  </object>
</topology>
"""
