"""What a configuration costs, by formula: FLOPs (memory and communication come with their own files)."""
