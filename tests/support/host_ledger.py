"""How many bytes of host memory the tensors made inside have at once, at most."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class HostLedger(TorchDispatchMode):
    """Follows the storages of all tensors that operators return inside.

    Attributes:
        peak: most bytes alive at once so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = weakref.ref(storage)
        self.peak = max(self.peak, self.live())
        return result

    def live(self) -> int:
        """Bytes alive now."""
        storages = [reference() for reference in self._alive.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)
