"""PBS and Grid Engine, whose jobs are scripts given to qsub."""
