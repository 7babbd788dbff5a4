"""The report of runs: charts, images and an HTML page."""
