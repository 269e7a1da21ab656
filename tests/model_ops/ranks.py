"""What the processes of a test run; they import it by name."""

import os
import socket
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_megatrain.model_ops import (
    FeatureStore,
    GradientSettings,
    data_fingerprint,
    embed,
    feature_key,
    generate,
    gradient_features,
    over_dataset,
    sample_losses,
)
from tests.model_ops.subjects import Lit, llama, rows_of, text_batch

SETTINGS = GradientSettings(width=16)

# Processes are forked off one that has imported these and done nothing else, which saves each of them the imports.
mp.set_forkserver_preload(["torch.distributed.fsdp", "transformers.models.llama.modeling_llama", "lightning_megatrain.callbacks"])


def on_ranks(ranks: int, function: Any, folder: Path, *args: Any) -> list[Any]:
    """Returns what `function(rank, *args)` returns on each of some new processes that share a gloo group."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    given = (ranks, port, function, folder, args)
    mp.start_processes(_on_rank, args=given, nprocs=ranks, start_method="forkserver")  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


def _on_rank(rank: int, ranks: int, port: int, function: Any, folder: Path, args: tuple[Any, ...]) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        torch.save(function(rank, *args), folder / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()


def dataset(samples: int) -> list[dict[str, Tensor]]:
    return rows_of(text_batch(samples))


class Crash(RuntimeError):
    pass


class Counting:
    """gradient_features that counts the samples it sees, and fails after some."""

    def __init__(self, crash_after: int = 10**9) -> None:
        self.seen, self.crash_after = 0, crash_after

    def __call__(self, module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.seen += len(batch["input_ids"])
        if self.seen > self.crash_after:
            raise Crash
        return gradient_features(module, batch, SETTINGS)


def make_store(folder: Path, module: nn.Module, samples: int) -> FeatureStore:
    return FeatureStore(folder, feature_key(module, data_fingerprint(dataset(samples), progress=False), SETTINGS, step=0))


def share(rank: int, sizes: list[int], folder: str) -> dict[int, dict[str, Any]]:
    return {samples: _share(rank, samples, folder) for samples in sizes}


def _share(rank: int, samples: int, folder: str) -> dict[str, Any]:
    module, data = llama(), dataset(samples)
    store = make_store(Path(folder) if rank == 0 else Path(folder) / "elsewhere", module, samples)  # the ranks share no disk
    seen = Counting()
    return {
        "losses": over_dataset(sample_losses, module, data, batch_size=2, progress=False),
        "features": over_dataset(seen, module, data, batch_size=2, store=store, batches_per_shard=1, progress=False),
        "seen": seen.seen,
        "texts": over_dataset(partial(generate, max_new_tokens=2), module, data, batch_size=2, progress=False),
    }


def unreadable_store(rank: int, folder: str) -> str:
    module = llama()
    store = make_store(Path(folder) / str(rank), module, 3)
    store.load = Mock(side_effect=PermissionError)  # type: ignore[method-assign]
    try:
        over_dataset(Counting(), module, dataset(3), batch_size=2, store=store, progress=False)
    except Exception as error:
        return type(error).__name__
    return "none"


class Ask(pl.Callback):
    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step == 2:
            adam = GradientSettings(width=16, preconditioner="adam")
            self.found = {
                "losses": over_dataset(sample_losses, pl_module, dataset(7), batch_size=2, progress=False),
                "features": over_dataset(
                    partial(gradient_features, settings=SETTINGS), pl_module, dataset(7), batch_size=2, progress=False
                ),
                "adam": over_dataset(partial(gradient_features, settings=adam), pl_module, dataset(7), batch_size=2, progress=False),
            }


def train_under_ddp(rank: int, folder: str) -> dict[str, Any]:
    return {"asked": _train(True, folder), "silent": _train(False, folder)}


def _train(ask: bool, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    callback = Ask()
    trainer = pl.Trainer(
        max_steps=4,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback] if ask else [],
        default_root_dir=folder,
    )
    module = Lit(llama())
    trainer.fit(module, DataLoader(dataset(16), batch_size=2))  # type: ignore[arg-type]
    return {"weights": [p.detach() for p in module.parameters()], **callback.found}


OPERATIONS = {"losses": sample_losses, "embeddings": embed, "texts": lambda m, b: generate(m, b, 3)}


def ask_sharded(rank: int, samples: int) -> dict[str, Any]:
    """FSDP2, as ModelParallelStrategy applies it, on each layer and on the whole."""
    model = llama()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found = {name: operation(model, text_batch()) for name, operation in OPERATIONS.items()}
    found |= {
        f"{name} over {samples}": over_dataset(op, model, dataset(samples), batch_size=2, progress=False) for name, op in OPERATIONS.items()
    }
    try:
        gradient_features(model, text_batch())
    except NotImplementedError as error:
        found["refusal"] = str(error)
    return found


def ask_zero3(rank: int) -> dict[str, Any]:
    """DeepSpeed's ZeRO-3 engine: parameters are empty outside the forwards of their modules."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for collectives within a machine
    config = {"train_micro_batch_size_per_gpu": 5, "zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True}
    found: dict[str, Any] = {}
    for name, operations in (("asked", OPERATIONS), ("silent", {})):
        model = llama()
        engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        assert all(p.numel() == 0 for p in model.parameters())
        torch.manual_seed(0)
        found |= {operation: ask(model, text_batch()) for operation, ask in operations.items()}
        engine.backward(engine(**text_batch()).loss)
        engine.step()
        found[name] = sample_losses(model, text_batch())  # after the step
    return found
