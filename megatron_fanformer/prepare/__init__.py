"""Turns documents, in Dolma's format or similar, into token files: the command `prepare`."""
