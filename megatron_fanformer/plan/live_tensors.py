"""Counts the bytes of live tensors, and their peak, on simulated ranks and in the experiments' models on a CPU."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryTracker(TorchDispatchMode):
    """Tracks, while entered, the bytes of all live tensors, real or fake, that operations return.

    Storages are counted: views share one, and one that is resized counts with its new size. Memory that a kernel
    allocates for itself while it runs is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held_bytes = 0  # of all storages that are alive
        self.peak_bytes = 0  # the largest `held_bytes` so far
        self._sizes: dict[int, int] = {}  # bytes by the storage's address in C++
        # Weak references by that address, kept so that they call `_forget` when their storages are freed.
        self._references: dict[int, Any] = {}

    def __enter__(self) -> Any:
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_and_note(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._note(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_note  # type: ignore  # no dispatch mode sees a resize
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]  # torch's own again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and track its results."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that is new, or has a new size, until it is freed."""
        address, size = storage._cdata, storage.nbytes()
        old_size = self._sizes.get(address)
        if old_size is None:
            self._references[address] = weakref.ref(storage, lambda _: self._forget(address))
        if size != old_size:
            self._sizes[address] = size
            self.held_bytes += size - (old_size or 0)
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _forget(self, address: int) -> None:  # called when the storage there is freed
        self.held_bytes -= self._sizes.pop(address)
        del self._references[address]
