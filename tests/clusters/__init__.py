"""Runs on what looks like several machines: a Slurm cluster in namespaces."""
