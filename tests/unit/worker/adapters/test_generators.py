"""The generators that a data set and a model may draw from."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hpctrain.worker.adapters.torch.generators import SampleNumbers  # noqa: E402


def test_numbers_of_a_gpu_depend_on_the_sample_and_its_stream_goes_on_alike_on_all_ranks(monkeypatch):
    """A data set that augments there, of which each rank fetches other samples, and other numbers of them."""
    gpu = torch.Generator()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", [None, gpu])
    drawn = []
    for samples in ((0, 1, 2), (2, 3)):
        gpu.manual_seed(7)
        numbers = SampleNumbers(0, object(), None)
        with numbers.in_use():
            for sample in samples:
                numbers.of_sample(0, sample)
                drawn.append((sample, torch.rand(1, generator=gpu).item()))
        assert torch.equal(gpu.get_state(), torch.Generator().manual_seed(7).get_state())
    # A worker process is a fork, in which a GPU is out of reach.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "default_generators", None)
    with numbers.in_use():
        numbers.of_sample(0, 3)
    assert len(set(drawn)) == len(dict(drawn)) == len({number for _, number in drawn}) == 4


def test_seeds_of_generators_that_a_data_set_holds_are_those_of_worker_processes_without_a_gpu(monkeypatch):
    class Data:
        def __init__(self):
            self.own = np.random.default_rng(0)

    found = []
    for on_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda on_gpu=on_gpu: on_gpu)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "default_generators", [torch.Generator()])
        data = Data()
        numbers = SampleNumbers(0, data, None)
        with numbers.in_use():
            numbers.of_sample(0, 1)
            found.append((data.own.random(), torch.rand(1).item(), np.random.rand()))
    assert found[0] == found[1]
