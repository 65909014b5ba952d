"""Checkpoints: the state of a training after a step, each either whole on disk or not there.

::

    RUN_DIR/checkpoints/step-00000123/state.json               the manifest, with its hash in state.sha256
    RUN_DIR/checkpoints/step-00000123/rank-0-of-2.safetensors  rank 0's share of the state
    RUN_DIR/checkpoints/.step-00000123.TOKEN/                  one that is being written, or was when the run crashed
    RUN_DIR/checkpoints/damaged-step-00000123/                 one that was found damaged, and is set aside

What is equal on all ranks is in one share; of what is divided over ranks, each piece is in one
(:mod:`hpctrain.common.checkpoints.pieces`); what is a rank's own has the rank's number after its name. Nothing in these
files can run code when it is read.
"""
