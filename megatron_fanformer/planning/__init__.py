"""What a configuration costs, by formula: FLOPs, memory, memory traffic and communication."""
