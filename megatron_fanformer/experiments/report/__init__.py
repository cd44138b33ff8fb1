"""The results of experiments, for people: the page, and two runs compared with each other."""
