"""What a node must show before it joins a run: the command `check-node`."""
