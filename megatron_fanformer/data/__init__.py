"""Token files, and the samples and micro batches that a run reads from them.

From a token file to a batch: `token_files`, `check`, `datasets` (with `samples`), `batches`.
"""
