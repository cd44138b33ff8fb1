"""Published training runs: read as jobs, and the constants of the step time fitted to them."""
