"""The report: runs as an HTML page, in a file or served while they are running."""
