"""Sweeps: one configuration at many points and seeds, each cell an ordinary run."""
