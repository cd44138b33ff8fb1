"""Whole experiments built from the package's parts; the demo is the first."""
