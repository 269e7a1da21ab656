"""What HostAdamW refuses, before any memory is touched."""

import functools
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import add, le
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def describe(tensor: Tensor) -> str:
    """A tensor in an error message: shape, dtype and device."""
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of the same shape have the same elements at the same places in memory."""
    return (a.is_contiguous() and b.is_contiguous()) or a.stride() == b.stride()


def is_working_copy(copy: Tensor, parameter: Tensor) -> bool:
    """Whether a tensor can be the BF16 copy of an FP32 parameter."""
    kinds = isinstance(copy, torch.BFloat16Tensor) and isinstance(parameter, torch.FloatTensor)
    return kinds and copy.shape == parameter.shape and same_layout(copy, parameter)


def check_options(masters: str, moments: str, threads: int | None) -> None:
    """Raise ValueError for an option of the whole optimizer that is none."""
    if masters not in ("fp32", "split", "none"):
        raise ValueError(f'masters is "fp32", "split" or "none", not {masters!r}')
    if moments not in ("fp32", "bf16", "int8"):
        raise ValueError(f'moments is "fp32", "bf16" or "int8", not {moments!r}')
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}; None takes torch.get_num_threads()")


def check_group(group: Mapping[str, Any], moments: str) -> None:
    """Raise ValueError for a hyperparameter that is out of range or has no meaning here."""
    lr, (beta1, beta2) = float(group["lr"]), (float(beta) for beta in group["betas"])
    if not lr >= 0:
        raise ValueError(f"lr must not be negative, is {lr}")
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(f"betas must lie in [0, 1), are {beta1} and {beta2}")
    for name in ("eps", "weight_decay"):
        if not group[name] >= 0:
            raise ValueError(f"{name} must not be negative, is {group[name]}")
    for name in {"masters", "moments", "threads"}.intersection(group):
        raise ValueError(f"{name}={group[name]!r} in a parameter group has no effect: it is the whole optimizer's, HostAdamW(..., {name}=)")
    for name in ("capturable", "differentiable"):
        if group[name]:
            raise ValueError(f"HostAdamW updates host memory outside of autograd and CUDA graphs; use torch.optim.AdamW for {name}=True")
    if group["amsgrad"] and moments != "fp32":
        raise ValueError(f'amsgrad needs exact second moments, not moments="{moments}"; use moments="fp32" or amsgrad=False')


def check_parameter(parameter: Tensor, masters: str) -> None:
    """Raise TypeError for a parameter that cannot be updated here; warn once where its updates will be rounded to BF16."""
    if not parameter.is_cpu:
        raise TypeError(
            f"HostAdamW updates parameters in host memory, this one is {describe(parameter)}; move it with .cpu(), "
            "or give it to torch.optim.AdamW(fused=True)"
        )
    if is_made_of_others(parameter) or parameter.is_inference() or parameter.layout is not torch.strided or parameter.is_neg():
        raise TypeError(
            f"HostAdamW writes a parameter's own memory, and a {type(parameter).__name__} {describe(parameter)} has none that it may write "
            "(FSDP2 and tensor parallelism shard it, quantization packs it, inference mode freezes it, it is sparse or negated in a view); "
            "use torch.optim.AdamW(fused=True)"
        )
    if parameter.dtype == torch.bfloat16:
        if masters == "fp32":
            raise TypeError(
                f'a BF16 parameter {tuple(parameter.shape)} under masters="fp32": most updates are smaller than a BF16 weight can take. '
                'masters="split" trains it exactly at 12 bytes; model.float() makes FP32 weights; masters="none" rounds each update to BF16'
            )
        if masters == "none":
            _warn_rounded()
    elif parameter.dtype != torch.float32:
        raise TypeError(f"HostAdamW takes FP32 and BF16 parameters, not {describe(parameter)}; convert it with .float()")
    # empty_like keeps the strides of dense tensors, and of no others.
    if not parameter.is_contiguous() and torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        raise TypeError(
            f"parameter {describe(parameter)} with strides {parameter.stride()} has gaps or overlaps in memory; "
            "set parameter.data = parameter.data.contiguous()"
        )


def check_working_copy(copy: Tensor, parameter: Tensor) -> None:
    """Raise ValueError for a tensor that cannot be the BF16 copy of a parameter."""
    if not is_working_copy(copy, parameter):
        raise ValueError(
            f"a working copy is BF16 and of an FP32 parameter's shape and strides on the CPU: parameter {describe(parameter)}, "
            f"copy {describe(copy)}; torch.empty_like(parameter, dtype=torch.bfloat16) makes one"
        )


def check_apart(params: Sequence[Tensor]) -> None:
    """Raise ValueError if two parameters share memory, which threads would then write at once."""
    begins = [p.data_ptr() for p in params]
    ends = map(add, begins, [p.nbytes for p in params])
    if all(map(le, sorted(ends), sorted(begins)[1:])):  # the first ends before the second begins, and so on
        return
    spans = sorted([(begin := p.data_ptr(), begin + p.nbytes, number) for number, p in enumerate(params) if p.nbytes])
    for (_, end, one), (begin, _, other) in pairwise(spans):
        if begin < end:
            shapes = f"{tuple(params[one].shape)} and {tuple(params[other].shape)}"
            raise ValueError(
                f"parameters of shapes {shapes} share memory, or are one parameter twice. Tie weights by the parameter itself "
                "(head.weight = embedding.weight), not by its .data"
            )


def checked_gradient(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """The gradient, laid out like the parameter, in FP32 or BF16.

    Raises:
        ValueError: if it is missing or has another shape.
        TypeError: if it is sparse or not on the CPU.
    """
    if gradient is None:
        raise ValueError(f"parameter {describe(parameter)} has no gradient; leave it out of this update")
    if gradient.layout is not torch.strided:
        raise TypeError(
            "HostAdamW takes dense gradients, not sparse ones; make the embedding with sparse=False, or give its parameters to "
            "torch.optim.SparseAdam"
        )
    if is_made_of_others(gradient):
        raise TypeError(f"HostAdamW reads a gradient's own memory, and a {type(gradient).__name__} has none; give it .to_local()")
    if not gradient.is_cpu:
        raise TypeError(f"HostAdamW takes gradients in host memory, this one is {describe(gradient)}; move it with .cpu()")
    if gradient.shape != parameter.shape:
        raise ValueError(f"gradient {describe(gradient)} for a parameter of shape {tuple(parameter.shape)}")
    if isinstance(gradient, (torch.FloatTensor, torch.BFloat16Tensor)) and same_layout(parameter, gradient):  # not negated, not lazily zero
        check_memory("a gradient", gradient)
        return gradient
    dtype = torch.bfloat16 if gradient.dtype == torch.bfloat16 else torch.float32
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(gradient)


def check_memory(name: str, tensor: Tensor) -> None:
    """Raise TypeError for a tensor that should have memory and has none."""
    if tensor.numel() and not tensor.data_ptr():
        raise TypeError(
            f"{name} has no memory: {type(tensor).__name__} {describe(tensor)}. Either its storage was given back (resize_(0)) and must be "
            "filled again before the step, or it only stands for tensors elsewhere (DTensor, FakeTensor); give .to_local()"
        )


def is_made_of_others(tensor: Tensor) -> bool:
    """Whether a tensor has no memory of its own: DTensor, and what quantization packs."""
    return type(tensor) not in (Tensor, Parameter) and hasattr(tensor, "__tensor_flatten__")


@functools.cache
def _warn_rounded() -> None:
    warnings.warn(
        'masters="none": each new BF16 weight is rounded, which loses every update below 1/256 of the weight. '
        'masters="split" keeps them all for 2 bytes a parameter.',
        stacklevel=4,
    )
