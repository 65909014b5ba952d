"""Lets scripts for tf.distribute, and for Horovod with Keras, find a run as they find one of their own launchers.

tf.distribute reads ``TF_CONFIG``, which ranks have with the backend ``multi_worker``. Horovod 0.28.1 knows Keras 2
alone: on Keras 3 its DistributedOptimizer reduces nothing, and its callbacks fail.
"""

from __future__ import annotations

from types import ModuleType

from hpctrain.common.run.plan import Plan
from hpctrain.worker.comm.after_import import change_after_import


def serve_tensorflow_scripts(plan: Plan) -> None:
    """Prepare this rank for a script that distributes by itself. Called before the script begins; collective."""
    served = ("horovod.tensorflow", "horovod._keras", "horovod._keras.callbacks")
    change_after_import(dict.fromkeys(served, _serve_horovod))
    if plan.backend == "multi_worker":
        from hpctrain.worker.comm import name_tensorflow_workers

        name_tensorflow_workers()


def _serve_horovod(module: ModuleType) -> None:
    """Change one of Horovod's modules, if Keras is Keras 3."""
    import tensorflow as tf

    if tf.keras.__version__ < "3":
        return
    from hpctrain.worker.adapters import horovod_keras

    if module.__name__ == "horovod.tensorflow":
        horovod_keras.serve_variables(module)
    elif module.__name__ == "horovod._keras":
        module.create_distributed_optimizer = horovod_keras.create_distributed_optimizer  # type: ignore[attr-defined]
        module.load_model = horovod_keras.load_model  # type: ignore[attr-defined]
    else:
        horovod_keras.serve_callbacks(module)
