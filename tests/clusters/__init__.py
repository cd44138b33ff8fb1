"""Runs on what looks like several machines: a Slurm cluster, or hosts with a network between them, in namespaces."""
