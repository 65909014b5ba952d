"""The bandwidth of an InfiniBand link from its width and speed."""

from __future__ import annotations

# Payload of a lane in Gbit/s: the signalling rate less its line code (8b/10b up to QDR, 64b/66b up to EDR, 64b/66b
# with forward error correction from HDR on). InfiniBand Trade Association, InfiniBand Architecture Specification,
# volume 2, and its roadmap.
LANE_GBIT = {
    "SDR": 2.0,
    "DDR": 4.0,
    "QDR": 8.0,
    "FDR10": 10.0,
    "FDR": 14.0625 * 64 / 66,
    "EDR": 25.0,
    "HDR": 50.0,
    "NDR": 100.0,
    "XDR": 200.0,
}


def bandwidth(width: int | None, speed: str | None) -> float:
    """Payload in bytes per second and direction; NaN if width or speed is unknown."""
    if width is None or speed is None:
        return float("nan")
    return width * LANE_GBIT[speed] * 1e9 / 8
