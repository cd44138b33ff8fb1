"""What the server imports from which the workers of `prepare` are forked in tests: a spawned one takes half a second.

Its workers' parent is this server, which ends with the process that they work for.
"""

# Not used here, but by what is forked off.
import pyarrow.parquet  # noqa: F401
import sentencepiece  # noqa: F401
import tokenizers  # noqa: F401

from megatron_fanformer.prepare import pipeline
from megatron_fanformer.processes import end_with_parent

pipeline.end_with_owner = end_with_parent
