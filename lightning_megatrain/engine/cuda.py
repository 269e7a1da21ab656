"""The one place that calls `torch.cuda`: page-locking host memory where it lies."""

import torch


class CudaPageLocker:
    """Locks host pages for CUDA and ROCm devices by `cudaHostRegister`."""

    def lock(self, address: int, nbytes: int) -> bool:
        """Returns whether the system agreed to lock `nbytes` at `address`; both are whole pages."""
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0

    def unlock(self, address: int) -> None:
        """Unlocks what `lock` locked at `address`."""
        torch.cuda.cudart().cudaHostUnregister(address)
