"""Operations over a dataset: in its order, on every rank, once per sample."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_megatrain.model_ops import embed, generate, gradient_features, over_dataset, sample_losses
from tests.model_ops.ranks import SETTINGS, Counting, Crash, dataset, make_store, on_ranks, share, train_under_ddp, unreadable_store
from tests.model_ops.subjects import Lit, llama, text_batch


def whole(operation: Any, samples: int = 7) -> Any:
    return operation(llama(), text_batch(samples))


@pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
def test_results_come_in_the_datasets_order_at_any_batch_size(batch_size: int) -> None:
    found = over_dataset(sample_losses, llama(), dataset(7), batch_size=batch_size, progress=False)
    torch.testing.assert_close(found, whole(sample_losses))
    embeddings = over_dataset(partial(embed, pooling="last_token"), llama(), dataset(7), batch_size=batch_size, progress=False)
    torch.testing.assert_close(embeddings, whole(partial(embed, pooling="last_token")))
    texts = over_dataset(partial(generate, max_new_tokens=3), llama(), dataset(7), batch_size=batch_size, progress=False)
    assert torch.utils._pytree.tree_map(Tensor.tolist, texts) == torch.utils._pytree.tree_map(
        Tensor.tolist, whole(partial(generate, max_new_tokens=3))
    )


def test_indices_choose_samples_and_their_order() -> None:
    found = over_dataset(sample_losses, llama(), dataset(7), batch_size=2, indices=[5, 0, 3], progress=False)
    torch.testing.assert_close(found, whole(sample_losses)[[5, 0, 3]])


def test_the_users_collate_and_workers_make_the_batches() -> None:
    samples = [(row["input_ids"][: int(row["attention_mask"].sum())]).tolist() for row in dataset(7)]
    found = over_dataset(sample_losses, llama(), samples, batch_size=3, collate_fn=collate, num_workers=1, progress=False)
    torch.testing.assert_close(found, whole(sample_losses))


def collate(samples: list[list[int]]) -> dict[str, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(s) for s in samples], batch_first=True, padding_value=-1)
    return {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long(), "labels": ids.masked_fill(ids < 0, -100)}


def test_what_cannot_be_walked_is_refused() -> None:
    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(dataset(7))

    with pytest.raises(TypeError, match="map-style dataset with a length, but Stream"):
        over_dataset(sample_losses, llama(), Stream(), batch_size=2)
    with pytest.raises(ValueError, match="Got 0 indices"):
        over_dataset(sample_losses, llama(), [], batch_size=2)
    with pytest.raises(ValueError, match="Got 2 indices, 1 different"):
        over_dataset(sample_losses, llama(), dataset(7), batch_size=2, indices=[1, 1])
    with pytest.raises(ValueError, match="returned 1 rows for a batch of 2 samples"):
        over_dataset(lambda m, b: sample_losses(m, b)[:1], llama(), dataset(7), batch_size=2, progress=False)


def test_rank_0_shows_a_bar_named_after_the_operation(capsys: pytest.CaptureFixture[str]) -> None:
    over_dataset(partial(embed, pooling="mean"), llama(), dataset(7), batch_size=2)
    assert "embed" in capsys.readouterr().err


def test_inside_a_trainer_batches_pass_the_users_transfer_hooks() -> None:
    class Shifted(Lit):
        """Samples arrive one token off, and a hook puts them right."""

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch | {"input_ids": batch["input_ids"] - 1}

    found: list[Tensor] = []

    class Ask(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            found.append(over_dataset(sample_losses, pl_module, shifted, batch_size=3, progress=False))

    shifted = [row | {"input_ids": row["input_ids"] + 1} for row in dataset(7)]
    trainer = pl.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Ask()],
    )
    trainer.fit(Shifted(llama()), DataLoader(shifted, batch_size=2))  # type: ignore[arg-type]
    torch.testing.assert_close(found[0], whole(sample_losses))


# --- resumed from a store ---


def test_after_a_crash_only_the_missing_rows_are_computed(tmp_path: Path) -> None:
    module = llama()
    with pytest.raises(Crash):
        over_dataset(
            Counting(5), module, dataset(7), batch_size=1, store=make_store(tmp_path, module, 7), batches_per_shard=2, progress=False
        )
    assert make_store(tmp_path, module, 7).load()[0].tolist() == [0, 1, 2, 3]
    again = Counting()
    found = over_dataset(
        again, module, dataset(7), batch_size=1, store=make_store(tmp_path, module, 7), batches_per_shard=2, progress=False
    )
    assert again.seen == 3
    expected = over_dataset(Counting(), module, dataset(7), batch_size=1, progress=False)
    assert torch.equal(found, expected)
    nothing = Counting()
    assert torch.equal(
        over_dataset(nothing, module, dataset(7), batch_size=1, store=make_store(tmp_path, module, 7), progress=False), expected
    )
    assert nothing.seen == 0


def test_of_a_damaged_shard_only_its_own_rows_are_computed_again(tmp_path: Path) -> None:
    module, options = llama(), {"batch_size": 1, "batches_per_shard": 2, "progress": False}
    expected = over_dataset(Counting(), module, dataset(7), store=make_store(tmp_path, module, 7), **options)
    shard = sorted(make_store(tmp_path, module, 7).path.glob("rows-*"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    again = Counting()
    with pytest.warns(UserWarning, match=f"{shard.name} is damaged"):
        found = over_dataset(again, module, dataset(7), store=make_store(tmp_path, module, 7), **options)
    assert again.seen == 2
    assert torch.equal(found, expected)
    assert make_store(tmp_path, module, 7).load()[0].tolist() == list(range(7))


# --- two processes ---


@pytest.mark.long
def test_two_processes_share_the_samples_and_agree(tmp_path: Path) -> None:
    """With one sample, the second rank's share is empty."""
    ranks = on_ranks(2, share, tmp_path, [7, 1], str(tmp_path / "store"))
    for samples in (7, 1):
        for found in (rank[samples] for rank in ranks):
            torch.testing.assert_close(found["losses"], whole(sample_losses, samples))
            torch.testing.assert_close(
                found["features"], whole(partial(gradient_features, settings=SETTINGS), samples), rtol=1e-4, atol=1e-6
            )
            assert found["seen"] == (samples + 1) // 2
            assert len(found["texts"]) == samples
        assert torch.equal(ranks[0][samples]["features"], ranks[1][samples]["features"])
        assert make_store(tmp_path / "store", llama(), samples).load()[0].tolist() == list(range(samples))


@pytest.mark.long
def test_where_rank_0_cannot_read_the_store_no_rank_waits(tmp_path: Path) -> None:
    assert on_ranks(2, unreadable_store, tmp_path, str(tmp_path / "store")) == ["PermissionError", "RuntimeError"]


@pytest.mark.long
def test_under_ddp_operations_agree_and_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    ranks = on_ranks(2, train_under_ddp, tmp_path, str(tmp_path))
    for name in ("losses", "features", "adam"):
        assert torch.equal(ranks[0]["asked"][name], ranks[1]["asked"][name])
        assert ranks[0]["asked"][name].norm() > 0
    for rank in ranks:
        for found, expected in zip(rank["asked"]["weights"], rank["silent"]["weights"], strict=True):
            assert torch.equal(found, expected)
