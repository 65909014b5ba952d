"""Time, scaling, memory and energy of a training before it runs, each with an interval. Starts nothing.

For each number of nodes a training becomes a :class:`~hpctrain.control.predict.prediction.Run`: the seconds of a step
in many draws, what of it is waiting and full, how long the run is, and its memory; all figures and ranges follow. Two
models of a step make runs, each held against published runs that the other cannot express: ``job`` goes through the
layers and buckets of a recorded network, and ``transformers.step`` has closed forms for meshes.
"""
