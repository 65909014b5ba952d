"""What this package, its tests and its notebooks may not do, looked for in their syntax trees; SECURITY.md says why.

Names are followed through imports (``from os import system as run``), not through variables.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

import hpctrain
from hpctrain.common.files import checked_yaml

_ROOT = Path(__file__).parents[2]
_FILES = sorted(
    path
    for folder in ("hpctrain", "benchmarks", "slurm", ".ci", "tests", "notebooks")
    for ending in ("py", "ipynb")
    for path in (_ROOT / folder).rglob(f"*.{ending}")
)
# Files that may do what a rule refuses, and why.
_ALLOWED: dict[str, dict[str, str]] = {
    "import of pickle": {
        "hpctrain/worker/comm/base.py": "objects between the ranks of one run",
        "hpctrain/worker/comm/control.py": "objects between the ranks of one run",
        "hpctrain/worker/comm/mpi_collectives.py": "objects between the ranks of one run",
        "hpctrain/worker/adapters/torch/generators.py": "states of random generators are compared, and never loaded",
        "tests/mpi/programs/as_under_torchrun/finds.py": "that a rank can pickle what its script defines",
        "tests/unit/test_error_codes.py": "that an error reaches another process whole",
        "tests/unit/common/shards/test_shards.py": "that shards leave their files out of what workers of a loader get",
    },
    "load_model without safe_mode=True": {
        "tests/mpi/programs/horovod_keras_scripts.py": "Horovod's function, which has no such argument",
    },
    "runpy": {
        "hpctrain/worker/programs/trace_script.py": "the user's own script is what the user wants traced",
        "tests/fault_campaign/injected/sitecustomize.py": "a rank's program, with faults in it",
        "tests/support/comers/scripts/all.py": "the scripts beside it",
        "tests/support/comers/scripts/frameworks.py": "the scripts beside it",
        "tests/gpu/programs/on_gpu.py": "the program that a rank was started to run",
        "tests/support/warm_interpreters.py": "the program that a rank was started to run",
    },
    "text executed": {
        "hpctrain/worker/train/rank.py": "the user's own script is what the user wants executed",
        "tests/unit/worker/adapters/batch_cases.py": "calls that are written in the file itself",
    },
    "text for a shell": {
        "tests/unit/cli/test_program.py": "a shell closes and redirects the streams",
        "tests/unit/common/files/test_shell_words.py": "a shell reads printed words",
        "tests/mpi/programs/stalls.py": "of numbers alone",
        "tests/support/hosts/local_hosts.py": "a constant, for a process that has to be small",
        "tests/hosts/test_local_hosts.py": "of names of the tests' own hosts and folders",
        "tests/support/comers/cells.py": "a constant, which takes the folder and the command as arguments",
        "tests/unit/control/schedulers/test_job_control_flow.py": "that a command that is shown can be pasted",
        "tests/unit/common/shards/test_sharding.py": "that a command that is shown can be pasted",
        "tests/unit/control/launchers/test_command.py": "that a command that is shown can be pasted",
    },
    "listening on all interfaces": {"tests/unit/test_security.py": "what the rule looks for"},
    'unpacking without filter="data"': {
        "hpctrain/control/horovod/wheel.py": "a file with a known hash, with the filter where Python has filters",
    },
}

_PICKLES = {
    "pickle",
    "_pickle",
    "cPickle",
    "pickle5",
    "cloudpickle",
    "dill",
    "jsonpickle",
    "joblib",
    "marshal",
    "shelve",
}
_EXECUTE = {"eval", "exec", "compile", "__import__"} | {f"builtins.{name}" for name in ("eval", "exec", "compile")}
_SHELLS = {
    "os.popen",
    "os.system",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell",
    "pty.spawn",
}
_YAML_LOADS = {f"yaml.{name}{all_}" for name in ("load", "full_load", "unsafe_load") for all_ in ("", "_all")}
_UNSAFE_LOADERS = {"yaml.Loader", "yaml.CLoader", "yaml.UnsafeLoader", "yaml.FullLoader", "yaml.CFullLoader"}
_SHELL = re.compile(r"(.*/)?(ba|da|z|k)?sh")
_COMMAND = re.compile(r"-[a-z]*c[a-z]*")
_LISTENERS = {"bind", "create_server", "HTTPServer", "ThreadingHTTPServer", "TCPServer", "UDPServer", "start_server"}
_EVERYWHERE = {"", "0.0.0.0", "::"}


def _python(path: Path) -> str:
    """The Python in a file; of a notebook that of its cells, and of scripts that they write."""
    if path.suffix == ".py":
        return path.read_text()
    cells = ("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code")
    return "\n".join(re.sub(r"%%writefile .*\.py\n", "", cell) for cell in cells if not cell.startswith("%%bash\n"))


def refused(text: str) -> Iterator[tuple[int, str]]:
    """The line of each thing that no file may do, and what it is."""
    tree = ast.parse(text)
    names = _imported(tree)

    def full(node: ast.AST) -> str:
        """``os.path.join`` for that expression, however ``os`` or ``join`` were imported; empty for any other."""
        if isinstance(node, ast.Name):
            return names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            base = full(node.value)
            return f"{base}.{node.attr}" if base else f".{node.attr}"
        return ""

    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        yield from ((line, what) for what in _imports(node))
        yield from ((line, what) for what in _values(node, full))
        if isinstance(node, ast.Call):
            yield from ((line, what) for what in _call(node, full))


def _imported(tree: ast.AST) -> dict[str, str]:
    found: dict[str, str] = {"np": "numpy"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _imports(node: ast.AST) -> Iterator[str]:
    modules: list[str] = []
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    for top in {module.partition(".")[0] for module in modules}:
        if top in _PICKLES:
            yield f"import of {top}"
        if top == "runpy":
            yield "runpy"
    if any(module.endswith("enable_unsafe_deserialization") for module in modules):
        yield "Keras' unsafe deserialisation"


def _values(node: ast.AST, full: Callable[[ast.AST], str]) -> Iterator[str]:
    if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::"):
        yield "listening on all interfaces"
    if isinstance(node, ast.Attribute) and node.attr == "enable_unsafe_deserialization":
        yield "Keras' unsafe deserialisation"
    words = node.elts if isinstance(node, (ast.List, ast.Tuple)) else node.args if isinstance(node, ast.Call) else []
    if any(_matches(shell, _SHELL) and _matches(option, _COMMAND) for shell, option in pairwise(words)):
        yield "text for a shell"
    if isinstance(node, (ast.Name, ast.Attribute)) and full(node) in _UNSAFE_LOADERS:
        yield "a YAML loader that makes objects"


def _matches(node: ast.AST, pattern: re.Pattern[str]) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(pattern.fullmatch(node.value))


def _call(node: ast.Call, full: Callable[[ast.AST], str]) -> Iterator[str]:
    name, keywords = full(node.func), {keyword.arg: keyword.value for keyword in node.keywords}
    last = name.rpartition(".")[2]

    def lacks(keyword: str, wanted: object) -> bool:
        value = keywords.get(keyword)
        return not (isinstance(value, ast.Constant) and value.value == wanted)

    def has_other(keyword: str, wanted: object) -> bool:
        return keyword in keywords and lacks(keyword, wanted)

    everywhere = any(map(_is_everywhere, [*node.args, *keywords.values()]))
    rules = {
        "text executed": name in _EXECUTE,
        "a shell": name in _SHELLS or has_other("shell", False),
        "a YAML loader that makes objects": name in _YAML_LOADS and not _is_safe(node, full),
        "torch.load without weights_only=True": name == "torch.load" and lacks("weights_only", True),
        "NumPy's pickles": has_other("allow_pickle", False),
        "load_model without safe_mode=True": last == "load_model" and lacks("safe_mode", True),
        "Keras' unsafe deserialisation": has_other("safe_mode", True),
        'unpacking without filter="data"': name == "shutil.unpack_archive"
        or (last in ("extract", "extractall") and lacks("filter", "data")),
        "a temporary name that others can take": name == "tempfile.mktemp",
        "listening on all interfaces": last in _LISTENERS and everywhere,
    }
    yield from (what for what, found in rules.items() if found)


def _is_safe(node: ast.Call, full: Callable[[ast.AST], str]) -> bool:
    loaders = [*node.args[1:2], *(keyword.value for keyword in node.keywords if keyword.arg == "Loader")]
    return bool(loaders) and full(loaders[0]) in ("yaml.SafeLoader", "yaml.CSafeLoader")


def _is_everywhere(argument: ast.expr) -> bool:
    first = argument.elts[0] if isinstance(argument, ast.Tuple) and argument.elts else None
    return isinstance(first, ast.Constant) and first.value in _EVERYWHERE


@pytest.mark.parametrize("path", _FILES, ids=lambda path: str(path.relative_to(_ROOT)))
def test_no_file_does_what_is_refused(path: Path) -> None:
    name = str(path.relative_to(_ROOT))
    found = [f"{name}:{line}: {what}" for line, what in refused(_python(path)) if name not in _ALLOWED.get(what, {})]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("what", "name"), [(what, name) for what, files in _ALLOWED.items() for name in files])
def test_each_exception_is_needed(what: str, name: str) -> None:
    assert what in {found for _, found in refused(_python(_ROOT / name))}


def test_the_whole_tree_is_looked_at() -> None:
    assert Path(hpctrain.__file__) in _FILES
    assert Path(__file__) in _FILES
    assert len(_FILES) > 400
    assert _ROOT / "notebooks" / "01_first_run.ipynb" in _FILES


def test_a_notebook_is_looked_into(tmp_path: Path) -> None:
    cells = ["import pickle\n", "%%bash\nls [\n", "%%writefile own.py\nimport dill\n", "eval('1')"]
    path = tmp_path / "own.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": [cell]} for cell in cells]}))
    expected = {"import of pickle", "import of dill", "text executed"}
    assert {what for _, what in refused(_python(path))} == expected


_SNIPPETS = {
    "import of pickle": ["import pickle", "import os, pickle as p", "from pickle import loads", "import pickle.loads"],
    "import of marshal": ["import marshal"],
    "import of shelve": ["from shelve import open"],
    "import of dill": ["import dill"],
    "import of joblib": ["from joblib import load"],
    "import of cloudpickle": ["def f():\n    import cloudpickle"],
    "runpy": ["import runpy", "from runpy import run_path"],
    "text executed": ["eval('1')", "exec(text)", "compile(text, '', 'exec')", "import builtins\nbuiltins.eval('1')"],
    "a shell": [
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "from subprocess import Popen as P\nP(text, shell=how)",
        "import os\nos.system('ls')",
        "from os import popen as look\nlook('ls')",
        "import subprocess\nsubprocess.getoutput('ls')",
    ],
    "text for a shell": [
        "import subprocess\nsubprocess.run(['sh', '-c', text])",
        "run('/bin/bash', '-lc', text)",
        "command = ('srun', 'bash', '-ec')",
    ],
    "a YAML loader that makes objects": [
        "import yaml\nyaml.load(text)",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "import yaml\nyaml.full_load(text)",
        "from yaml import unsafe_load\nunsafe_load(text)",
        "import yaml as y\ny.load_all(text, Loader=any_other)",
        "import yaml\nclass Own(yaml.FullLoader): ...",
        "from yaml import UnsafeLoader as Base\nclass Own(Base): ...",
    ],
    "torch.load without weights_only=True": [
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "from torch import load\nload(path, weights_only=how)",
    ],
    "NumPy's pickles": ["import numpy as np\nnp.load(path, allow_pickle=True)", "load(path, allow_pickle=how)"],
    "load_model without safe_mode=True": ["import keras\nkeras.models.load_model(path)"],
    "Keras' unsafe deserialisation": [
        "import keras\nkeras.models.load_model(path, safe_mode=False)",
        "import keras\nkeras.config.enable_unsafe_deserialization()",
        "from keras.config import enable_unsafe_deserialization",
    ],
    'unpacking without filter="data"': [
        "tar.extractall(folder)",
        "tar.extractall(folder, filter='tar')",
        "zipfile.ZipFile(path).extract(name)",
        "import shutil\nshutil.unpack_archive(path)",
    ],
    "a temporary name that others can take": [
        "import tempfile\ntempfile.mktemp()",
        "from tempfile import mktemp\nmktemp()",
    ],
    "listening on all interfaces": [
        "listener.bind(('', 80))",
        "listener.bind(('0.0.0.0', 80))",
        "import socket\nsocket.create_server(('::', 0))",
        "from http.server import HTTPServer\nHTTPServer(server_address=('', 80))",
        "address = '0.0.0.0'",
    ],
}


@pytest.mark.parametrize(
    ("what", "snippet"), [(what, snippet) for what, snippets in _SNIPPETS.items() for snippet in snippets]
)
def test_each_rule_sees_what_breaks_it(what: str, snippet: str) -> None:
    assert what in {found for _, found in refused(snippet)}


@pytest.mark.parametrize(
    "snippet",
    [
        "import re\nre.compile('a')",
        "model.compile(optimizer)",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "import subprocess\nsubprocess.run(['bash', 'job.sh', '-c'])",
        "command = [sys.executable, '-c', text]",
        "import yaml\nyaml.safe_load(text)",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "import torch\ntorch.load(path, weights_only=True)",
        "import numpy as np\nnp.load(path)",
        "import keras\nkeras.models.load_model(path, safe_mode=True)",
        "tar.extractall(folder, filter='data')",
        "listener.bind(('127.0.0.1', 0))",
        "import traceback\ntraceback.extract_tb(trace)",
        "parts = text or ('', 0)",
    ],
)
def test_what_is_safe_passes(snippet: str) -> None:
    assert not list(refused(snippet))


def test_own_loader_makes_plain_values_only() -> None:
    loader = checked_yaml._Reader
    assert issubclass(loader, yaml.SafeLoader)
    assert loader.yaml_constructors.keys() <= yaml.SafeLoader.yaml_constructors.keys()
    assert not loader.yaml_multi_constructors
