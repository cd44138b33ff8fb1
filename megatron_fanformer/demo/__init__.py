"""Whole experiments out of the package's parts; the demo is the first."""
