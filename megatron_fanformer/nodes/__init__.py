"""The checks that a node must pass before it joins a run: the command `check-node`."""
