"""Operations on parameters that are sharded over processes: the collectives stay in step, and answers are those of the whole model."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_megatrain.model_ops import gradient_features
from tests.model_ops.ranks import OPERATIONS, ask_sharded, ask_zero3, on_ranks
from tests.model_ops.subjects import Lit, llama, rows_of, text_batch


@pytest.mark.long
def test_two_ranks_of_fsdp2_answer_as_the_whole_model(tmp_path: Path) -> None:
    """Three samples: the second rank has one less, and must still take part in every gathering of weights."""
    model = llama()
    expected = {name: operation(model, text_batch()) for name, operation in OPERATIONS.items()}
    for found in on_ranks(2, ask_sharded, tmp_path, 3):
        for name in ("losses", "embeddings"):
            torch.testing.assert_close(found[name], expected[name])
            torch.testing.assert_close(found[f"{name} over 3"], OPERATIONS[name](model, text_batch(3)))
        assert [[t.tolist() for t in texts] for texts in found["texts"]] == [[t.tolist() for t in texts] for texts in expected["texts"]]
        assert len(found["texts over 3"]) == 3
        assert "gradient_features needs whole parameters" in found["refusal"]


def test_one_rank_of_fsdp2_answers_as_the_whole_model(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        found, expected = ask_sharded(0, 3), {name: operation(llama(), text_batch()) for name, operation in OPERATIONS.items()}
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close(found["losses"], expected["losses"])
    torch.testing.assert_close(found["embeddings"], expected["embeddings"])
    assert "gradient_features needs whole parameters" in found["refusal"]


@pytest.mark.long
def test_deepspeed_zero_3_answers_as_the_whole_model_and_trains_on(tmp_path: Path) -> None:
    """Its next step is the one it would have made: nothing of an operation stays in its gradient buffers."""
    pytest.importorskip("deepspeed", reason="pip install deepspeed==0.19.8 to try ZeRO-3, which no other test needs")
    found = on_ranks(1, ask_zero3, tmp_path)[0]
    model = llama()
    for name, operation in OPERATIONS.items():
        for leaf, wanted in zip(tree_leaves(found[name]), tree_leaves(operation(model, text_batch())), strict=True):
            assert torch.equal(leaf, wanted)
    assert torch.equal(found["asked"], found["silent"])
    assert (found["asked"] < found["losses"]).all()


class Gathering(torch.nn.Module):
    """A wrapper, as FSDP's and DeepSpeed's, within whose forward alone the weights are there."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module, self.weights = module, [p.detach().clone() for p in module.parameters()]
        for p in module.parameters():
            p.data.zero_()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for p, weight in zip(self.module.parameters(), self.weights, strict=True):
            p.data.copy_(weight)
        try:
            return self.module(*args, **kwargs)
        finally:
            for p in self.module.parameters():
                p.data.zero_()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_run_within_the_strategys_wrapper(operation: str) -> None:
    found: list[Any] = []

    class Ask(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            plain, trainer.strategy.model = trainer.strategy.model, Gathering(pl_module)
            found.append(OPERATIONS[operation](pl_module, text_batch()))
            with pytest.raises(NotImplementedError, match="needs whole parameters, but SingleDeviceStrategy shards them"):
                gradient_features(pl_module, text_batch())
            trainer.strategy.model = plain
            trainer.should_stop = True

    trainer = pl.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Ask()],
    )
    trainer.fit(Lit(llama()), DataLoader(rows_of(text_batch()), batch_size=2))  # type: ignore[arg-type]
    for leaf, wanted in zip(tree_leaves(found), tree_leaves(OPERATIONS[operation](llama(), text_batch())), strict=True):
        assert torch.equal(leaf, wanted)
