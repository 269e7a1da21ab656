"""A model operation over a whole dataset, shared by the ranks.

Shapes: N samples, B samples of one batch.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from lightning_megatrain.model_ops.context import device_of, trainer_of
from lightning_megatrain.model_ops.store import FeatureStore
from lightning_megatrain.model_ops.trace import leave_no_trace

STAND_IN = -1  # the index of a row that only keeps a rank in step with the others


def over_dataset(
    operation: Callable[[nn.Module, Any], Any],
    module: nn.Module,
    dataset: Any,
    *,
    batch_size: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    indices: Sequence[int] | None = None,
    num_workers: int = 0,
    store: FeatureStore | None = None,
    batches_per_shard: int = 16,
    progress: bool = True,
) -> Any:
    """Returns `operation`'s result for every sample of `dataset`, in the dataset's order, the same on every rank.

    Each rank takes every W-th sample. All ranks run the same number of batches of the same size, repeating a sample where their share is
    short (or empty) and dropping its result, so collectives inside the model never wait for a rank that has finished. Inside a Trainer,
    batches pass the module's and datamodule's transfer hooks as training batches do. Leaves no trace: random augmentations of the dataset
    draw from generators that are put back.

    Args:
        operation: `sample_losses`, `embed`, `generate`, `gradient_features`, or a `functools.partial` of one; called as `operation(module,
            batch)`. It returns a tensor with a row per sample, or a list with an entry per sample.
        module: as `operation` takes it.
        dataset: map-style, with a length.
        batch_size: samples of one batch on one rank.
        collate_fn: the training loader's. (default: torch's)
        indices: which samples, in this order, without repeats. (default: all)
        num_workers: loader processes. (default: 0)
        store: holds rows already computed and takes new ones as they come, so that after a crash only the missing ones are computed. For
            tensors.
        batches_per_shard: batches between two writes to the store. (default: 16)
        progress: whether rank 0 shows a bar. (default: True)

    Returns:
        A tensor (N, ...) on the CPU, or a list of N entries. Rows are those of `indices` where given.

    Raises:
        TypeError: when the dataset has no length or no `__getitem__`.
        ValueError: when there is no sample, an index repeats or is not of the dataset, the batch size is below one, or the operation
            returns another number of rows than samples.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"over_dataset needs a map-style dataset with a length, but {type(dataset).__name__} is not one. Materialise the samples "
            "first: `list(dataset)`."
        )
    wanted = list(range(len(dataset))) if indices is None else [int(i) for i in indices]
    if not wanted or len(set(wanted)) != len(wanted):
        raise ValueError(
            f"Got {len(wanted)} indices, {len(set(wanted))} different ones, of a dataset of {len(dataset)}: pass at least one, each once."
        )
    if not 0 <= min(wanted) <= max(wanted) < len(dataset):
        raise ValueError(f"`indices` must be between 0 and {len(dataset) - 1}, got {min(wanted)} to {max(wanted)}.")
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
    rows: dict[int, Any] = {} if store is None else _stored(store, wanted)
    todo = [i for i in wanted if i not in rows]
    rank, replicas = _share(module)
    mine = todo[rank::replicas]
    mine_padded = mine + [STAND_IN] * (-(-len(todo) // replicas) - len(mine))
    batches = [mine_padded[i : i + batch_size] for i in range(0, len(mine_padded), batch_size)]
    with leave_no_trace(module):
        loaded = _load(module, dataset, batches, todo[0] if todo else 0, collate_fn, num_workers)
        bar = tqdm(
            loaded, total=len(batches), desc=_name(operation), disable=not progress or _global_rank() != 0 or not batches, leave=False
        )
        pending: list[tuple[list[int], Any]] = []
        for number, (batch_indices, batch) in enumerate(bar, start=1):
            result = operation(module, batch)
            if len(result) != len(batch_indices):
                raise ValueError(
                    f"{_name(operation)} returned {len(result)} rows for a batch of {len(batch_indices)} samples. Does the collate "
                    "function drop samples?"
                )
            pending.append((batch_indices, result.detach().cpu() if isinstance(result, Tensor) else result))
            if number == len(batches) or (store is not None and number % batches_per_shard == 0):
                gathered = _gather(pending, device_of(module))
                if store is not None and _global_rank() == 0:
                    store.append(list(gathered), torch.stack(list(gathered.values())))
                if store is not None:  # as they will be read
                    gathered = {i: row.to(store.dtype).float() for i, row in gathered.items()}
                rows.update(gathered)
                pending = []
    ordered = [rows[i] for i in wanted]
    return torch.stack(ordered) if isinstance(ordered[0], Tensor) else ordered


def _load(
    module: nn.Module,
    dataset: Any,
    batches: list[list[int]],
    stand_in: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    num_workers: int,
) -> Iterator[tuple[list[int], Any]]:
    trainer = trainer_of(module)
    plan = [[stand_in if i == STAND_IN else i for i in batch] for batch in batches]
    # A generator of its own: a loader draws its workers' seed from the global one.
    loader = DataLoader(
        dataset, batch_sampler=plan, collate_fn=collate_fn, num_workers=num_workers, generator=torch.Generator().manual_seed(0)
    )
    for batch_indices, batch in zip(batches, loader, strict=True):
        if trainer is not None and trainer.lightning_module is module and trainer.state.status == "running":
            batch = trainer.precision_plugin.convert_input(batch)
            batch = trainer.strategy.batch_to_device(
                trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0), dataloader_idx=0
            )
        yield batch_indices, batch


def _stored(store: FeatureStore, wanted: list[int]) -> dict[int, Any]:
    """Returns the stored rows that are wanted, as rank 0 sees them: the ranks must agree, and may not share a disk."""
    found: list[Any] = [None]
    try:
        if _global_rank() == 0:
            found = [store.load()]
    finally:  # the other ranks wait for word
        if _world_size() > 1:
            dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        raise RuntimeError("Rank 0 could not read the feature store.")
    indices, rows = found[0]
    chosen = set(wanted)
    return {i: row for i, row in zip(indices.tolist(), rows, strict=True) if i in chosen}


def _gather(pending: list[tuple[list[int], Any]], device: torch.device) -> dict[int, Any]:
    """Returns every rank's rows by index, without stand-ins; ranks hold the same number of rows."""
    indices = [i for batch_indices, _ in pending for i in batch_indices]
    if isinstance(pending[0][1], Tensor):
        rows: Any = torch.cat([result for _, result in pending])
        if _world_size() > 1:
            device = torch.device("cpu") if "gloo" in dist.get_backend() or "cpu" in dist.get_backend() else device
            all_indices = _all_gather(torch.tensor(indices, device=device))
            return {i: row for i, row in zip(all_indices.tolist(), _all_gather(rows.to(device)).cpu(), strict=True) if i != STAND_IN}
    else:
        rows = [row for _, result in pending for row in result]
        if _world_size() > 1:
            shares: list[Any] = [None] * _world_size()
            dist.all_gather_object(shares, (indices, _on_cpu(rows)))
            return {i: row for share in shares for i, row in zip(*share, strict=True) if i != STAND_IN}
    return {i: row for i, row in zip(indices, rows, strict=True) if i != STAND_IN}


def _all_gather(tensor: Tensor) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def _on_cpu(rows: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.cpu(), rows)


def _share(module: nn.Module) -> tuple[int, int]:
    """Returns this rank's place among those that take different data, and how many they are."""
    trainer = trainer_of(module)
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) if trainer is not None else None
    if sampler and _world_size() > 1:
        return int(sampler["rank"]), int(sampler["num_replicas"])
    return _global_rank(), _world_size()


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _global_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _name(operation: Any) -> str:
    return str(getattr(getattr(operation, "func", operation), "__name__", type(operation).__name__))
