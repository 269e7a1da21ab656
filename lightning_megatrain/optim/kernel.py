"""The compiled kernel: finding it, and running it on several threads."""

import ctypes
import functools
import os
import time
import warnings
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from lightning_megatrain.optim import arithmetic
from lightning_megatrain.optim.arithmetic import Update
from lightning_megatrain.optim.scalars import Scalars
from lightning_megatrain.optim.workers import Workers

LIBRARY = Path(__file__).with_name("libhost_adamw.so")
_FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 3}
_SPLIT = 2
_FORMAT = 2  # of what host_adamw.c stores


class _Tensor(ctypes.Structure):
    """`struct tensor` of host_adamw.c, field by field."""

    _fields_ = [
        ("n", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("param", "low", "grad", "m", "v", "m_scale", "v_scale", "v_max", "copy")),
        *((name, ctypes.c_int32) for name in ("param_form", "grad_form", "moment_form")),
        ("seed", ctypes.c_uint32),
        ("scalars", Scalars),
    ]


def run(updates: list[Update], threads: int) -> None:
    """Apply the updates with the compiled kernel, or in torch where there is none.

    Args:
        updates: the tensors of a step; none may share memory with another.
        threads: how many threads work, this one included. The result does not depend on it.
    """
    library = load()
    if library is None:
        arithmetic.run(updates)
        return
    tensors = (_Tensor * len(updates))(*map(_describe, updates))
    next_piece = ctypes.c_int64(0)
    arguments = (tensors, len(updates), ctypes.byref(next_piece))
    begun: list[None] = []
    ended: list[None] = []

    def help_out() -> None:
        begun.append(None)
        library.megatrain_host_adamw(*arguments)  # ctypes releases the GIL
        ended.append(None)

    def wait() -> None:  # one that begins later finds no piece left, and touches no memory
        while len(ended) < len(begun):
            time.sleep(1e-5)

    pieces = sum(-(-u.param.numel() // arithmetic.PIECE) for u in updates)
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
        if library.megatrain_host_adamw_abi() != _FORMAT << 32 | ctypes.sizeof(_Tensor):
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
    library.megatrain_host_adamw.argtypes = [ctypes.POINTER(_Tensor), ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)]
    return library


@functools.cache
def _workers() -> Workers:
    return Workers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.cache_clear)  # threads do not survive a fork


def _describe(u: Update) -> _Tensor:
    return _Tensor(
        u.param.numel(),
        u.param.data_ptr(),
        _address(u.low),
        u.grad.data_ptr(),
        u.exp_avg.data_ptr(),
        u.exp_avg_sq.data_ptr(),
        _address(u.exp_avg_scale),
        _address(u.exp_avg_sq_scale),
        _address(u.max_exp_avg_sq),
        _address(u.working_copy),
        _FORMS[u.param.dtype] if u.low is None else _SPLIT,
        _FORMS[u.grad.dtype],
        _FORMS[u.exp_avg.dtype],
        u.seed,
        u.scalars,
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
