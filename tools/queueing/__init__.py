"""The parts of `tools/gpu_queue.py`, and the check of a machine."""
