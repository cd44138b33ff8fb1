"""Costs of a configuration by formula: FLOPs, memory, memory traffic and communication."""
