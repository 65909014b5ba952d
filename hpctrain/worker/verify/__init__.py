"""Records what a script or recipe computes, step by step, for ``hpctrain verify``; loaded under that command alone."""
