"""The run: its configuration, optimizer, schedule, step, metrics, evaluation and loop."""
