"""PyTorch's torchrun, whose store listens at one address, where the hosts agree on it, instead of on all networks.

``python -m hpctrain.worker.programs.torchrun --rdzv-backend=one-address --rdzv-endpoint=HOST:PORT --rdzv-conf=rank=N
--nnodes=…`` and the other options of torchrun. Port 0 is for a single host, and takes one that is free: another run's
torchrun can never have it. The store does not authenticate its clients, and the ranks trust what it holds.
"""

from __future__ import annotations

import sys
from typing import cast

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous, create_rdzv_handler
from torch.distributed.run import main

from hpctrain.common.cluster.launcher import ONE_ADDRESS
from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.addresses import listener_at


class OneAddressRendezvous(StaticTCPRendezvous):
    """A rendezvous of numbered hosts; the first one's store listens at the address by which the others name it."""

    _store: TCPStore | None

    def get_backend(self) -> str:
        return ONE_ADDRESS

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None and self.rank == 0:
            own = listener_at(self.master_addr, self.master_port, self.world_size)
            if own:
                self.master_port = own.getsockname()[1]
                self._store = TCPStore(
                    self.master_addr,
                    self.master_port,
                    self.world_size,
                    True,
                    self.timeout,
                    # The store owns the socket from here on, and closes it at its own end.
                    master_listen_fd=own.detach(),
                )
        return super().next_rendezvous()


def _make(parameters: RendezvousParameters) -> RendezvousHandler:
    met = cast(StaticTCPRendezvous, create_rdzv_handler(parameters))
    rank = int(met.rank)  # an option's text
    seconds = int(met.timeout.total_seconds())
    return OneAddressRendezvous(met.master_addr, met.master_port, rank, met.world_size, met.run_id, seconds)


if __name__ == "__main__":
    rendezvous_handler_registry.register(ONE_ADDRESS, _make)
    try:
        main()
    except HpctrainError as error:
        print(f"hpctrain: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
