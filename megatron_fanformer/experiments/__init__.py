"""The paper's experiments: sweeps, probes and reports."""
