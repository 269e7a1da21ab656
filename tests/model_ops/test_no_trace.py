"""An operation leaves gradients, optimizer state, generators, modes, buffers and the loader's place as they were."""

import copy
import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_megatrain.model_ops import GradientSettings, embed, generate, gradient_features, leave_no_trace, over_dataset, sample_losses
from tests.model_ops.subjects import Lit, llama, rows_of, text_batch

OPERATIONS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "sample_losses": sample_losses,
    "embed": embed,
    "generate": lambda module, batch: generate(module, batch, 3, num_samples=2, seed=0),
    "gradient_features": lambda module, batch: gradient_features(module, batch, GradientSettings(width=16)),
    "gradient_features dense adam": lambda module, batch: gradient_features(
        module,
        batch,
        GradientSettings(width=16, projection="dense", preconditioner="adam", parameters=("model.*",)),
        optimizers=[module.optimizer],
    ),
    "over_dataset": lambda module, batch: over_dataset(sample_losses, module, rows_of(batch), batch_size=2, progress=False),
}


class Careless(nn.Module):
    """A model full of state: running statistics, spectral norm, a counter, random augmentation, a submodule kept in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.side = nn.Sequential(nn.BatchNorm1d(4), torch.nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Dropout(0.5))
        self.model.model.layers[0].eval()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("absent", None)
        self.register_buffer("renewed", torch.ones(2))
        self.last: Tensor | None = None

    def compute_sample_losses(self, batch: Any) -> Tensor:
        random.random(), np.random.rand(), torch.rand(1)
        self.calls += 1
        self.renewed = self.renewed + 1
        self.side.train()  # a hook of the user's that forgets to be careful
        self.side(torch.ones(5, 4))
        self.side.eval()
        self.kept = torch.ones(3)
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none").mean(1)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_leaves_no_trace(operation: str) -> None:
    module, batch = Careless(), text_batch()
    module.optimizer = torch.optim.AdamW(module.model.parameters(), lr=1e-3)  # type: ignore[assignment]
    for _ in range(2):
        module.compute_sample_losses(batch).sum().backward()
        module.optimizer.step()
    for p in list(module.parameters())[::2]:
        p.grad = None  # some with gradients, some without
    seen = everything(module)
    grads, buffers = [p.grad for p in module.parameters()], list(module.buffers())
    requires = [p.requires_grad for p in module.parameters()]
    OPERATIONS[operation](module, batch)
    assert_equal(everything(module), seen)
    assert all(p.grad is g for p, g in zip(module.parameters(), grads, strict=True))
    assert all(now is before for now, before in zip(module.buffers(), buffers, strict=True))
    assert [p.requires_grad for p in module.parameters()] == requires
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.model.modules())
    assert all("forward" not in vars(m) for m in module.modules())


def test_everything_is_put_back_after_an_exception() -> None:
    class Failing(Careless):
        def compute_sample_losses(self, batch: Any) -> Tensor:
            super().compute_sample_losses(batch)
            raise RuntimeError("at the end")

    module = Failing()
    module.optimizer = torch.optim.AdamW(module.parameters())  # type: ignore[assignment]
    seen = everything(module)
    for operation in (sample_losses, gradient_features):
        with pytest.raises(RuntimeError, match="at the end"):
            operation(module, text_batch())
        assert_equal(everything(module), seen)
        assert not any(m._forward_hooks for m in module.model.modules())


def everything(module: Any) -> dict[str, Any]:
    """All that an operation could change, copied; asking for it changes nothing."""
    return {
        "weights": [p.detach().clone() for p in module.parameters()],
        "grads": [None if p.grad is None else p.grad.clone() for p in module.parameters()],
        "buffers": [b.clone() for b in module.buffers()],
        "buffer names": [sorted(m._buffers) for m in module.modules()],
        "attributes": [sorted(k for k, v in vars(m).items() if isinstance(v, Tensor)) for m in module.modules()],
        "modes": [m.training for m in module.modules()],
        "optimizer": copy.deepcopy(module.optimizer.state_dict()),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state().clone(),
        "grad enabled": torch.is_grad_enabled(),
    }


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit."""
    for name, wanted in expected.items():
        leaves, wanted_leaves = torch.utils._pytree.tree_leaves(found[name]), torch.utils._pytree.tree_leaves(wanted)
        assert len(leaves) == len(wanted_leaves), name
        for leaf, wanted_leaf in zip(leaves, wanted_leaves, strict=True):
            if isinstance(leaf, Tensor):
                assert torch.equal(leaf, wanted_leaf), name
            elif isinstance(leaf, np.ndarray):
                assert np.array_equal(leaf, wanted_leaf), name
            else:
                assert leaf == wanted_leaf, name


def test_a_graph_of_the_caller_survives_an_operation() -> None:
    """Between a training forward and its backward: nothing autograd saved may be written."""
    module = Careless()
    module.train()
    normalised = module.side[0](torch.randn(5, 4, requires_grad=True))
    loss = llama_loss(module) + normalised.sum()
    sample_losses(module, text_batch())
    loss.backward()


def llama_loss(module: Careless) -> Tensor:
    return module.model(**text_batch()).loss


def test_leave_no_trace_keeps_what_the_body_leaves_alone_uncopied() -> None:
    module = nn.BatchNorm1d(3)
    version = module.running_mean._version  # type: ignore[union-attr]
    with leave_no_trace(module):
        assert not module.training
    assert module.running_mean._version == version  # type: ignore[union-attr]
    assert module.training


@pytest.mark.parametrize("operation", ["sample_losses", "embed", "generate", "gradient_features", "over_dataset"])
def test_training_goes_on_bit_for_bit_and_the_loader_where_it_was(operation: str, tmp_path: Any) -> None:
    """The weights after six steps, with dropout and a shuffled loader, with and without operations in between."""

    class Ask(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
            if trainer.global_step % 2 == 0:
                pl_module.optimizer = trainer.optimizers[0]
                OPERATIONS[operation](pl_module, text_batch())

    def run(callbacks: list[pl.Callback]) -> list[Tensor]:
        pl.seed_everything(3, verbose=False)
        module = Lit(llama())
        loader = DataLoader(rows_of(text_batch(samples=12)), batch_size=2, shuffle=True)  # type: ignore[arg-type]
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, loader)
        assert trainer.global_step == 6
        return [p.detach() for p in module.parameters()]

    for found, expected in zip(run([Ask()]), run([]), strict=True):
        assert torch.equal(found, expected)
