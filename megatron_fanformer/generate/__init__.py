"""Generates text with a trained model: samples tokens, and decodes with megatron-core's key/value cache."""
