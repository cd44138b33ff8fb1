"""Text from a trained model: sampling, and decoding with megatron-core's key/value cache."""
