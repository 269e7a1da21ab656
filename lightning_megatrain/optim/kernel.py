"""The compiled kernel: finding it, and running it on several threads."""

import ctypes
import functools
import os
import struct
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from lightning_megatrain.optim import arithmetic
from lightning_megatrain.optim.arithmetic import Update
from lightning_megatrain.optim.moments import block_count
from lightning_megatrain.optim.scalars import Scalars
from lightning_megatrain.optim.workers import Workers

LIBRARY = Path(__file__).with_name("libhost_adamw.so")
FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 3}
SPLIT = 2
_FORMAT = 2  # of what host_adamw.c stores

ROW = struct.Struct(f"q9P3iI{ctypes.sizeof(Scalars)}s0q")
"""`struct tensor` of host_adamw.c, field by field: n; the addresses of param, low, grad, m, v, m_scale, v_scale, v_max and copy (or 0); the
forms of param, grad and moments; seed; `Scalars` as bytes."""


def run(tensors: ctypes.Array[ctypes.c_char], threads: int) -> None:
    """Apply the updates with the compiled kernel, or in torch where there is none.

    Args:
        tensors: a `ROW` for each tensor of a step, which the caller keeps alive; none may share memory with another.
        threads: how many threads work, this one included. The result does not depend on it.
    """
    library = load()
    if library is None:
        arithmetic.run([_in_torch(*row) for row in ROW.iter_unpack(tensors) if row[0]])
        return
    count = len(tensors) // ROW.size
    next_piece = ctypes.c_int64(0)
    arguments = (tensors, count, ctypes.byref(next_piece))
    begun: list[None] = []
    ended: list[None] = []

    def help_out() -> None:
        begun.append(None)
        library.megatrain_host_adamw(*arguments)  # ctypes releases the GIL
        ended.append(None)

    def wait() -> None:  # one that begins later finds no piece left, and touches no memory
        while len(ended) < len(begun):
            time.sleep(1e-5)

    pieces = count if count >= threads else sum(-(-row[0] // arithmetic.PIECE) for row in ROW.iter_unpack(tensors))
    with ExitStack() as whatever_happens:  # Ctrl-C leaves a whole step, and no thread in memory that somebody then frees
        whatever_happens.callback(wait)
        whatever_happens.callback(library.megatrain_host_adamw, *arguments)
        _workers().hand_out(help_out, min(threads, pieces) - 1)


@functools.cache
def load() -> ctypes.CDLL | None:
    """Find the compiled kernel beside this file; without it warn once and return None."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.megatrain_host_adamw_abi.restype = ctypes.c_int64
        if library.megatrain_host_adamw_abi() != _FORMAT << 32 | ROW.size:
            raise OSError(f"{LIBRARY} was built from another version")
    except OSError as error:
        warnings.warn(
            f"HostAdamW runs without its compiled kernel ({error}). The numbers are the same; a step takes about ten times as long. "
            "Install a wheel that carries the kernel, or a C compiler (cc or $CC) and then `pip install --force-reinstall --no-deps` "
            "this package from its source.",
            stacklevel=2,
        )
        return None
    library.megatrain_host_adamw.restype = None
    library.megatrain_host_adamw.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)]
    return library


@functools.cache
def _workers() -> Workers:
    return Workers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.cache_clear)  # threads do not survive a fork


def _in_torch(
    n: int,
    param: int,
    low: int,
    grad: int,
    m: int,
    v: int,
    m_scale: int,
    v_scale: int,
    v_max: int,
    copy: int,
    param_form: int,
    grad_form: int,
    moment_form: int,
    seed: int,
    scalars: bytes,
) -> Update:
    """A `ROW` as tensors of one dimension over the same memory."""

    def tensor(address: int, dtype: torch.dtype, length: int = n) -> Any:
        return torch.frombuffer((ctypes.c_char * (length * dtype.itemsize)).from_address(address), dtype=dtype) if address else None

    dtypes = {0: torch.float32, 1: torch.bfloat16, SPLIT: torch.bfloat16}
    return Update(
        tensor(param, dtypes[param_form]),
        tensor(grad, dtypes[grad_form]),
        Scalars.from_buffer_copy(scalars),
        seed,
        tensor(m, dtypes.get(moment_form, torch.int8)),
        tensor(v, dtypes.get(moment_form, torch.uint8)),
        tensor(m_scale, torch.float32, block_count(n)),
        tensor(v_scale, torch.float32, block_count(n)),
        tensor(low, torch.int16),
        tensor(v_max, torch.float32),
        tensor(copy, torch.bfloat16),
    )
