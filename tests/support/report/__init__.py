"""Plans and run directories that are written by hand."""
