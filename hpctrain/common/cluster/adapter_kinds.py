"""Kinds of adapters by their names: the link layer."""

from __future__ import annotations

import re
from typing import Literal

LinkLayer = Literal["InfiniBand", "Ethernet", "EFA", "Slingshot", "iWARP", "usNIC"]

# Adapters of these networks have no verbs that NCCL or UCX could use: both reach them through libfabric, which chooses
# the adapters itself (https://github.com/aws/aws-ofi-nccl).
LIBFABRIC: tuple[LinkLayer, ...] = ("EFA", "Slingshot")
# RDMA devices that neither NCCL nor UCX uses: they lack the connections that both make.
UNUSED: tuple[LinkLayer, ...] = ("iWARP", "usNIC")


# The beginnings of device names by their link layer. rdma-core names devices by it: ibp1s0, rocep1s0, iwp1s0, usp1s0,
# opap1s0, and rdmap1s0 where the kernel does not tell, which is EFA (kernel-boot/rdma_rename.c). The kernel's own
# names are those of drivers, some of which know Ethernet only. Azure's images name mlx5_ib0 and mlx5_an0 (accelerated
# networking).
_NAMES: tuple[tuple[LinkLayer, str], ...] = (
    ("EFA", r"rdmap|efa"),
    ("Slingshot", r"cxi|hs[in][0-9]"),
    ("usNIC", r"usnic|us[bosp][0-9]"),
    ("iWARP", r"iw|i40iw|cxgb[34]_|nes[0-9]|siw"),
    ("InfiniBand", r"ib|opa|hfi1_|mlx5_ib"),
    ("Ethernet", r".*bond|roce|eth|en|mlx5_an|bnxt_re|irdma|qedr|erdma|mana_|hns_|rxe"),
)


def link_layer_of_name(name: str) -> LinkLayer | None:
    """The link layer that a device's name suggests, if any. Only Ethernet ports are bonded: ``mlx5_bond_0``."""
    return next((layer for layer, names in _NAMES if re.match(names, name)), None)


def layer_of(name: str, known: LinkLayer | None) -> LinkLayer | None:
    """The link layer of a device, of which its ports say ``known``: its name may say more where these are Ethernet's,
    and says something where they say nothing.
    """
    by_name = link_layer_of_name(name)
    return by_name if by_name in (*LIBFABRIC, *UNUSED) else known or by_name
