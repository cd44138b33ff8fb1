"""The paper's experiments: sweeps and probes, the fits of what they measured, and the reports."""
