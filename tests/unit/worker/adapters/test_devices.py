"""Tensors that hpctrain makes inside a script say where: ``torch.set_default_device`` is about the script's own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hpctrain

_ROOT = Path(hpctrain.__file__).parent / "worker"
_FILES = sorted(path for folder in ("adapters", "comm", "data") for path in (_ROOT / folder).rglob("*.py"))
# What makes a tensor of no other one. `from_numpy` and `frombuffer` use memory that is there, and so have a device.
_MAKERS = {
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "normal", "ones", "rand", "randint"),
    *("randn", "randperm", "scalar_tensor", "sparse_coo_tensor", "tensor", "zeros"),
}


def _without_device(text: str) -> list[str]:
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in _MAKERS
        and not any(keyword.arg == "device" for keyword in node.keywords)
    ]


@pytest.mark.parametrize("path", _FILES, ids=lambda path: str(path.relative_to(_ROOT)))
def test_every_tensor_has_a_device(path: Path) -> None:
    assert _without_device(path.read_text()) == []


def test_one_without_is_found() -> None:
    assert len(_FILES) > 50
    text = "import torch\ntorch.zeros(3)\ntorch.zeros(3, device='cpu')\ntorch.zeros_like(x)\n"
    assert _without_device(text) == ["torch.zeros(3)"]
