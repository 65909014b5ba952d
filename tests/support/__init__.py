"""What tests of several folders share; tests import it as ``support``, of the folder ``tests``."""
