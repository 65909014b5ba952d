"""The states of PyTorch's random generators, which differ between ranks that compute samples of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from hpctrain.common.checkpoints.layout import RANDOM
from hpctrain.worker.adapters.data_ranks import stream_of
from hpctrain.worker.comm import Communicator
from hpctrain.worker.train.state import State

TORCH_RANDOM = f"{RANDOM}torch."


def torch_random_state(device: torch.device) -> State:
    """The states of the generators of the CPU and of a device, by their names in a checkpoint."""
    state = {f"{TORCH_RANDOM}cpu": torch.get_rng_state().numpy()}
    if device.type == "cuda":
        state[f"{TORCH_RANDOM}cuda"] = torch.cuda.get_rng_state(device).numpy()
    return state


def set_torch_random_state(tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Restore those of the states that are among the tensors."""
    if (state := tensors.get(f"{TORCH_RANDOM}cpu")) is not None:
        torch.set_rng_state(state)
    if device.type == "cuda" and (state := tensors.get(f"{TORCH_RANDOM}cuda")) is not None:
        torch.cuda.set_rng_state(state, device)


def part_streams(comm: Communicator) -> None:
    """Separate the ranks' random numbers, so that dropout draws a different mask on each. Collective.

    Rank 0's generators stay unchanged. The others are seeded by its state and the number of their stream, which ranks
    of one tp group share, because they compute the same samples with the same activations. Streams that already differ,
    because the script seeded each rank differently or restored its state, are kept.
    """
    if comm.size == 1:
        return
    own = stream_of(comm)
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    everyone = comm.allgather_object((own, [hashlib.sha256(state.numpy().tobytes()).digest() for state in states]))
    # CUDA may be in use on some ranks only.
    kinds = min(len(hashes) for _, hashes in everyone)
    if all(_apart([(stream, hashes[kind]) for stream, hashes in everyone]) for kind in range(kinds)):
        return
    first = comm.broadcast_object([state.numpy() for state in states])
    if own:
        base = first[0].tobytes() + own.to_bytes(8, "big")
        torch.manual_seed(int.from_bytes(hashlib.sha256(base).digest()[:7], "big"))
    elif comm.rank:
        torch.set_rng_state(torch.from_numpy(first[0]))
        if len(first) > 1 and len(states) > 1:
            torch.cuda.set_rng_state(torch.from_numpy(first[1]))


def _apart(states: list[tuple[int, bytes]]) -> bool:
    """Whether ranks have equal states if and only if they have the same stream."""
    pairs = set(states)
    return len(pairs) == len({stream for stream, _ in pairs}) == len({state for _, state in pairs})
