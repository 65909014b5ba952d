"""Time, scaling, memory and energy of a plan before it runs, each with an interval. Starts nothing."""
