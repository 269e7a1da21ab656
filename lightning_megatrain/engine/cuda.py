"""The one place that calls `torch.cuda`: page-locking host memory where it lies."""

import torch

from lightning_megatrain.engine.pinning import PAGE_LOCKERS


class CudaPageLocker:
    """Locks host pages for CUDA and ROCm devices by `cudaHostRegister`."""

    def lock(self, address: int, nbytes: int) -> bool:
        error = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        return error == 0

    def unlock(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)


PAGE_LOCKERS["cuda"] = CudaPageLocker
