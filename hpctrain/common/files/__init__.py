"""How files are written whole and read within bounds, with errors that say what to do."""
