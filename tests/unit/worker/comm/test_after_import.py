"""Changes of modules as they are imported."""

from __future__ import annotations

import importlib
import sys

from hpctrain.worker.comm.after_import import change_after_import


def test_a_module_is_changed_by_all_who_asked_before_and_after_its_import(tmp_path, monkeypatch):
    (tmp_path / "changed_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    for number in range(3):
        change_after_import({"changed_module": lambda module, number=number: seen.append((number, module.value))})
    assert not seen
    module = importlib.import_module("changed_module")
    assert seen == [(0, 1), (1, 1), (2, 1)]
    change_after_import({"changed_module": lambda module: seen.append(module)})
    assert seen[3:] == [module]
    monkeypatch.delitem(sys.modules, "changed_module")
    importlib.import_module("changed_module")
    assert len(seen) == 4
