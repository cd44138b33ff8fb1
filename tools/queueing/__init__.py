"""What `tools/gpu_queue.py` is made of: the parts, how they run, and what is read from what they leave."""
