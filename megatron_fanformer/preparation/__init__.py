"""From documents, in Dolma's format or their like, to token files: the command `prepare`."""
