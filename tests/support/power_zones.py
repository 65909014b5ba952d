"""A host's power zones as the kernel lays them out, in files that a test can change."""

from __future__ import annotations

from pathlib import Path

RANGE = 65_532_610_987
"""Of each counter, in microjoules; Intel's for DRAM."""


class PowerZones:
    """``/sys/class/powercap`` in a folder: one flat folder of links into the tree of the devices.

    Args:
        folder: where.
        names: of the zones, by number; ``0:1`` lies in ``0``.
    """

    def __init__(self, folder: Path, names: dict[str, str]) -> None:
        self.root = folder / "class" / "powercap"
        self.root.mkdir(parents=True)
        control = folder / "devices" / "virtual" / "powercap" / "intel-rapl"
        control.mkdir(parents=True)
        (self.root / "intel-rapl").symlink_to(control)
        for number, name in sorted(names.items()):
            parts = number.split(":")
            device = control.joinpath(*(f"intel-rapl:{':'.join(parts[: n + 1])}" for n in range(len(parts))))
            device.mkdir()
            (device / "name").write_text(f"{name}\n")
            (device / "max_energy_range_uj").write_text(f"{RANGE}\n")
            (self.root / f"intel-rapl:{number}").symlink_to(device)
            self.set(number, 0)

    def file(self, number: str) -> Path:
        """The counter of a zone."""
        return self.root / f"intel-rapl:{number}" / "energy_uj"

    def set(self, number: str, microjoules: int) -> None:
        """Let a counter show this, round its range."""
        self.file(number).write_text(f"{microjoules % RANGE}\n")


SERVER = {"0": "package-0", "0:0": "core", "0:1": "dram", "1": "package-1", "1:0": "dram", "2": "psys"}
