"""The bytes of all live tensors, as torch's operations make them and Python and autograd let them go.

Storages are what is counted: views share one, and one that is resized counts with its new size. It is the same for
real and for fake tensors. What a kernel allocates for itself while it runs is not seen.
"""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class MemoryTracker(TorchDispatchMode):
    """Tracks, while entered, the storage of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.held_bytes = 0
        """Bytes of the storages that are alive."""
        self.peak_bytes = 0
        """The largest value of `held_bytes` so far."""
        self._sizes: dict[int, int] = {}  # by the storage's address in C++
        self._references: dict[int, Any] = {}

    def forget_peak(self) -> None:
        """Begin a new peak, at what is held now."""
        self.peak_bytes = self.held_bytes

    def __enter__(self) -> Any:
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resizing(self._resize)  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what it returned."""
        result = func(*args, **(kwargs or {}))
        self._look_at(result)
        return result

    def _look_at(self, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self._note(result.untyped_storage())
        elif isinstance(result, list | tuple):
            for part in result:
                self._look_at(part)

    def _note(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        before = self._sizes.get(address)
        if before is None:
            self._references[address] = weakref.ref(storage, lambda _: self._forget(address))
        if before != size:
            self._sizes[address] = size
            self.held_bytes += size - (before or 0)
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _forget(self, address: int) -> None:
        self.held_bytes -= self._sizes.pop(address)
        del self._references[address]

    def _resizing(self, resize: Any) -> Any:
        """Torch's method, which no dispatch mode sees."""

        def resize_and_note(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._note(storage)
            return result

        return resize_and_note
