"""The training loop of recipes: what a rank does from its start to its end, in PyTorch and in Keras."""
