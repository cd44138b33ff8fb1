"""Where a run's metrics go: a module for each logger, and the table of them in `registry`."""
