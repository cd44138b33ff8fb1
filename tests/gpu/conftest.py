"""Readies the libraries where these tests are run alone, as tools/gpu_check.sh does: few packages may be there."""

from megatron_fanformer.runtime import device

device.prepare_libraries()
