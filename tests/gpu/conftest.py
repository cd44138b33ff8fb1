"""Readies the libraries where these tests are run alone, as tools/gpu_queue.py does: few packages may be there."""

from megatron_fanformer.runtime import device

device.prepare_libraries()
