"""Loggers of a run's metrics: a module for each, and the table of them in `registry`."""
