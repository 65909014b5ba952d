"""What a tensor is compared by, has to be the same in each run of a script."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hpctrain.worker.verify.torch_steps import ParameterNames  # noqa: E402


def test_models_that_follow_each_other_have_names_by_their_number() -> None:
    """As for each fold of a cross-validation: a model may get the identity, and the memory, of one before."""
    names = ParameterNames()
    for number in range(1, 30):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        names.add(model)
        found = names.of(list(model.parameters()))
        expected = ["0.weight", "0.bias"] if number == 1 else [f"0.weight ({number})", f"0.bias ({number})"]
        assert [found[each] for each in model.parameters()] == expected
        del model, found
