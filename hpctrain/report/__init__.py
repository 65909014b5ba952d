"""What a run shows of itself: the console, tables, pictures, report.html and trackers."""
