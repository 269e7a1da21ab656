"""Policies in a whole run of Lightning's ModelParallelStrategy over FSDP2, on processes with gloo."""

import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from lightning_megatrain.callbacks import LESS, ODM, DoReMi, LossReweighting, LossSelection, PolicyError, RandomSelection
from lightning_megatrain.datamodules import DynamicLoader
from tests.callbacks.modules import Llama, Sentences
from tests.trainers import quiet_trainer

KINDS = ["RandomSelection", "LossSelection", "ODM", "LossReweighting", "DoReMi"]


class Full(Sentences):
    """Rows of equal length, so that ranks hold equally many tokens."""

    def __init__(self, n=32):
        super().__init__(n)
        self.lengths[:] = 8


class Sharded(Llama):
    """Shards itself where the strategy has a mesh."""

    def configure_model(self):
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)


def policy_of(kind, reference):
    return {
        "RandomSelection": lambda: RandomSelection(size=16, every_n_steps=2),
        "LossSelection": lambda: LossSelection(size=16, every_n_steps=2),
        "ODM": lambda: ODM(domain="source", warmup_steps=1, reward_scale=30.0),
        "LossReweighting": lambda: LossReweighting("extremes"),
        "DoReMi": lambda: DoReMi(reference, domain="source"),
        "LESS": lambda: LESS(target=Sentences(3, seed=9), size=16, warmup_steps=1, width=256),
    }[kind]()


def train(kind, folder, sharded):
    """Returns history, samples seen and weights of a run of one device, or of two that share the model."""
    policy, module, seen = policy_of(kind, str(folder / "reference")), Sharded(), []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, *args):
            seen.append(trainer.train_dataloader.last.index.tolist())

        def on_fit_end(self, trainer, pl_module):
            whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in pl_module.parameters()]
            self.weights = torch.cat([p.detach().flatten() for p in whole])

    watch = Watch()
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if sharded else "auto"
    trainer = quiet_trainer(
        accelerator="cpu",
        devices=2 if sharded else 1,
        strategy=strategy,
        max_epochs=2,
        default_root_dir=folder,
        callbacks=[policy, watch],
    )
    trainer.fit(module, DynamicLoader(Full(), 4 if sharded else 8, seed=4, domain="source"))
    return {"history": policy.history, "seen": seen, "weights": watch.weights}


def train_sharded(rank: int, folder: str):
    os.environ["NODE_RANK"] = "0"
    found = {kind: train(kind, Path(folder), sharded=True) for kind in KINDS}
    try:
        train("LESS", Path(folder), sharded=True)
    except PolicyError as error:
        found["refusal"] = str(error)
    return found
