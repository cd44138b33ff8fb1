"""What a configuration costs, by formula: FLOPs, memory traffic and communication."""
