from __future__ import annotations

import sys
from importlib.util import find_spec

# Without Keras, the folder adapters/keras beside the tests of the adapters would do for `import keras`.
if find_spec("tensorflow") is None or find_spec("keras") is None:
    sys.modules["keras"] = None  # type: ignore[assignment]
