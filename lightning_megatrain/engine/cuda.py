"""The one place that calls `torch.cuda`: page-locking host memory where it lies."""

from contextlib import suppress

import torch


class CudaPageLocker:
    """Locks host pages for CUDA and ROCm devices by `cudaHostRegister`."""

    def lock(self, address: int, nbytes: int) -> bool:
        """Returns whether the system agreed to lock `nbytes` at `address`; both are whole pages."""
        if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0:
            return True
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")  # a launch takes up the error that the refusal left behind; it would fail the next one
        return False

    def unlock(self, address: int) -> None:
        """Unlocks what `lock` locked at `address`."""
        torch.cuda.cudart().cudaHostUnregister(address)
