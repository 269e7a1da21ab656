"""One screen that tells what lives where."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_megatrain.engine.sizes import size_text as _size

if TYPE_CHECKING:
    from lightning_megatrain.engine.engine import Engine


def report(engine: "Engine", optimizers: Iterable[Optimizer] = ()) -> str:
    """Describes what the engine keeps where, in bytes, with bytes per parameter on the host, and what it moved since its counts were reset.

    Args:
        engine: An engine that has run a step.
        optimizers: Optimizers whose state counts among the host's bytes.
    """
    parameters = list(engine.parameters.values())
    number = sum(p.numel() for p in parameters)
    streamed = sum(p.numel() for layer in engine.layers for p in layer.parameters)
    accounting = engine.accounting
    host = {
        "parameters": sum(p.nbytes for p in parameters),
        "gradients": sum(_nbytes(p.grad) for p in parameters),
        "optimizer state": sum(
            _nbytes(value) for optimizer in optimizers for state in optimizer.state.values() for value in state.values()
        ),
        "working copies": sum(layer.working_copy_bytes for layer in engine.layers),
        "transfer buffers": engine.transfer.ring_bytes + engine.gradients.staging_bytes,
        "saved inputs": engine.saved_inputs.host_bytes,
    }
    lines = [
        f"Streaming {len(engine.layers)} layers to {engine.device}: {number:,} parameters, {streamed / number:.0%} of them streamed, the "
        "rest resident",
        f"{'on the host':<20}{'bytes':>12}{'a parameter':>14}",
        *(f"  {name:<18}{_size(nbytes):>12}{nbytes / number:>14.1f}" for name, nbytes in host.items()),
        f"  {'in all':<18}{_size(sum(host.values())):>12}{sum(host.values()) / number:>14.1f}",
        f"{'on the device':<20}{'now':>12}{'peak':>14}",
        *(f"  {kind:<18}{_size(accounting.device_bytes[kind]):>12}{_size(peak):>14}" for kind, peak in accounting.peak_bytes.items()),
        f"moved: {_size(accounting.bytes_to_device)} to the device, {_size(accounting.bytes_to_host)} to the host; "
        f"{accounting.loads.total()} loads, {accounting.prefetch_misses} of them waited for",
    ]
    if engine.kept_layers:
        lines.append(engine.kept_layers)
    memory = engine.memory
    if memory.wanted_bytes:
        lines.append(f"page-locked: {_size(memory.locked_bytes)} of {_size(memory.wanted_bytes)}")
    if memory.locked_bytes < memory.wanted_bytes:
        lines.append(
            "  The system refused the rest. Its copies go through "
            + (
                "a small locked ring, one pass over host memory more."
                if engine.transfer.ring_bytes
                else "unlocked memory, and the device waits for them."
            )
            + " Raise the limit with `ulimit -l unlimited` (in a container: --ulimit memlock=-1)."
        )
    if engine.saved_inputs.unlocked_bytes:
        lines.append(
            f"  {_size(engine.saved_inputs.unlocked_bytes)} of saved inputs lie in memory that the system refused to page-lock: the device "
            "waits for their copies."
        )
    return "\n".join(lines)


def _nbytes(value: Any) -> int:
    if not isinstance(value, Tensor):
        return 0
    return value._values().nbytes + value._indices().nbytes if value.is_sparse else value.nbytes
