"""A bare DynamicLoader, no policy anywhere: a resumed run sees the samples that the run never stopped would have seen."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_megatrain.callbacks import RandomSelection
from lightning_megatrain.datamodules import DynamicLoader
from tests.callbacks.modules import Linear, Points, fit


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([Points()[i] for i in range(24)])


class Scheduled(Linear):
    """Asks for the number of steps, so Lightning makes the loader before it has read the checkpoint (its issue 20550)."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=int(self.trainer.estimated_stepping_batches))]


class WithValidation(Linear):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).square().mean())


class SeededByEpoch(torch.utils.data.Sampler):
    """As DistributedSampler: another order in each epoch, by its number."""

    epoch = 0

    def __len__(self):
        return 24

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Mixer(L.Callback):
    """Decides by hand, without a policy: from the third step on, only two domains."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 3 and trainer.train_dataloader.has_domains:
            trainer.train_dataloader.set_proportions(dict(zip(trainer.train_dataloader.domains, (3.0, 1.0, 0.0), strict=False)))


def one_pass(**kwargs):
    return DynamicLoader(Points(), 4, **kwargs)


def long_mixture(**kwargs):
    sources = {"a": Points(10), "b": Points(7), "c": Points(24)}
    return DynamicLoader(sources, 4, proportions={"a": 1, "b": 2, "c": 3}, steps_per_epoch=6, **kwargs)


def streams(**kwargs):
    return DynamicLoader({"a": Stream(), "b": Stream()}, 4, proportions={"a": 1, "b": 2}, steps_per_epoch=6, **kwargs)


def wrapped():
    return DataLoader(Points(), 4, sampler=SeededByEpoch())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [one_pass, long_mixture, streams])
@pytest.mark.parametrize("module", [Linear, Scheduled])
def test_a_bare_loader_resumes_inside_an_epoch_and_at_its_end(make, module, num_workers, tmp_path):
    whole = module()
    every_step = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    at_the_end = ModelCheckpoint(tmp_path, save_top_k=-1, save_on_train_epoch_end=True, filename="end-{epoch}")
    callbacks = [Mixer(), every_step, at_the_end]
    fit(whole, make(num_workers=num_workers), callbacks, max_epochs=3, enable_checkpointing=True)
    assert len(whole.seen) == 18
    for name, step in (("step=2", 2), ("step=3", 3), ("step=6", 6), ("end-epoch=0", 6), ("step=8", 8), ("end-epoch=1", 12)):
        resumed = module()
        fit(resumed, make(num_workers=num_workers), [Mixer()], max_epochs=3, ckpt_path=tmp_path / f"{name}.ckpt")
        assert resumed.seen == whole.seen[step:], name


def test_a_finished_run_goes_on_where_it_ended(tmp_path):
    whole, half, rest = Linear(), Linear(), Linear()
    fit(whole, long_mixture(), max_epochs=4)
    fit(half, long_mixture(), max_epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    fit(rest, long_mixture(), max_epochs=4, ckpt_path=tmp_path / "half.ckpt")
    assert half.seen + rest.seen == whole.seen


@pytest.mark.parametrize("val", [None, 1, 2], ids=["no-validation", "validation", "validation-every-second-epoch"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("make", [one_pass, long_mixture, wrapped])
def test_under_max_steps_an_epochs_end_is_resumed_from_too(make, accumulate, val, tmp_path):
    """Of a checkpoint from the end of an epoch Lightning counts that epoch twice, and may take a batch for the second time."""

    def run(folder, steps, **options):
        module, at_end = WithValidation(), True if val == 2 else None
        saver = ModelCheckpoint(tmp_path / folder, save_top_k=-1, filename="{epoch}", save_on_train_epoch_end=at_end)
        callbacks = [saver, RandomSelection(size=3, warmup_steps=99)] if isinstance(loader := make(), DataLoader) else [saver]
        checks = {"val": DataLoader(Points(), 4), "check_val_every_n_epoch": val} if val else {}
        options |= {"accumulate_grad_batches": accumulate, "enable_checkpointing": True, "max_steps": steps // accumulate}
        fit(module, loader, callbacks, max_epochs=None, **checks, **options)
        return module

    whole = run("whole", 24)
    assert len(whole.seen) == 24
    for epoch in (0, 1):  # also twice in a row
        resumed = run("once", 24, ckpt_path=tmp_path / "whole" / f"epoch={epoch}.ckpt")
        assert resumed.seen == whole.seen[6 * (epoch + 1) :]
        assert torch.equal(resumed.layer.weight, whole.layer.weight)
    again = run("twice", 24, ckpt_path=min((tmp_path / "once").iterdir()))
    assert again.seen == whole.seen[-len(again.seen) :]
    assert len(again.seen) in (6, 12)
    assert run("first", 6).seen + run("rest", 24, ckpt_path=next((tmp_path / "first").iterdir())).seen == whole.seen


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("make", [one_pass, long_mixture, wrapped])
def test_a_run_that_max_steps_ended_inside_an_epoch_goes_on_inside_it(make, accumulate, tmp_path):
    """Lightning counts the epoch in which the run ended, and counts it again when the run goes on in it."""

    def run(steps, **options):
        module, loader = Linear(), make()
        callbacks = [RandomSelection(size=3, warmup_steps=99)] if isinstance(loader, DataLoader) else []
        options |= {"accumulate_grad_batches": accumulate, "max_steps": steps // accumulate}
        return module, fit(module, loader, callbacks, max_epochs=None, **options)

    whole, _ = run(24)
    modules = []
    for i, steps in enumerate((8, 16, 24)):  # 8 of 24, then 16, are inside the second and the third epoch of 6
        module, trainer = run(steps, ckpt_path=tmp_path / f"{i - 1}.ckpt" if i else None)
        trainer.save_checkpoint(tmp_path / f"{i}.ckpt")
        modules.append(module)
    assert sum((module.seen for module in modules), []) == whole.seen
    assert torch.equal(modules[-1].layer.weight, whole.layer.weight)


@pytest.mark.parametrize("limit", [6, 3], ids=["whole-epochs", "epochs-cut-short"])
def test_resumed_from_an_epochs_end_and_then_from_every_later_step(limit, tmp_path):
    def run(folder, **options):
        module = Linear()
        at_end = ModelCheckpoint(tmp_path / folder, save_top_k=-1, filename="end-{step}", save_on_train_epoch_end=True)
        every_step = ModelCheckpoint(tmp_path / folder, save_top_k=-1, filename="{step}", every_n_train_steps=1)
        options |= {"max_epochs": None, "max_steps": 3 * limit, "limit_train_batches": limit, "enable_checkpointing": True}
        fit(module, one_pass(), [at_end, every_step], **options)
        return module

    whole = run("whole")
    run("once", ckpt_path=tmp_path / "whole" / f"end-step={limit}.ckpt")
    for step in range(limit + 1, 3 * limit):
        again = run("again", ckpt_path=tmp_path / "once" / f"step={step}.ckpt")
        assert again.seen == whole.seen[step:], step
        assert torch.equal(again.layer.weight, whole.layer.weight)


def test_a_loader_that_was_resumed_serves_a_new_trainer_too(tmp_path):
    first, loader = Linear(), one_pass()
    fit(first, one_pass(), max_epochs=None, max_steps=6).save_checkpoint(tmp_path / "end.ckpt")
    fit(Linear(), loader, max_epochs=None, max_steps=12, ckpt_path=tmp_path / "end.ckpt")  # counts the first epoch twice
    new = Linear()
    fit(new, loader)
    assert new.seen == first.seen


def test_epochs_cut_short_go_on_too(tmp_path):
    whole, resumed = Linear(), Linear()
    saver = ModelCheckpoint(tmp_path, save_top_k=-1, save_on_train_epoch_end=True, filename="{epoch}")
    fit(whole, long_mixture(), [saver], max_epochs=3, limit_train_batches=4, enable_checkpointing=True)
    fit(resumed, long_mixture(), max_epochs=3, limit_train_batches=4, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert resumed.seen == whole.seen[4:]


def test_at_the_end_of_an_epoch_the_batch_size_may_change(tmp_path):
    first, second = Linear(), Linear()
    fit(first, one_pass()).save_checkpoint(tmp_path / "end.ckpt")
    fit(second, DynamicLoader(Points(), 6), max_epochs=2, ckpt_path=tmp_path / "end.ckpt")
    assert [len(batch) for batch in second.seen] == [6] * 4
    assert sorted(sum(second.seen, [])) == list(range(24))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("make", [one_pass, long_mixture, streams])
def test_overfit_batches_trains_on_the_first_batches_again_and_again(make, num_workers, tmp_path):
    whole, plain, resumed = Linear(), Linear(), Linear()
    fit(plain, make())
    loader = make(num_workers=num_workers)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    fit(whole, loader, [saver], overfit_batches=2, max_epochs=3, enable_checkpointing=True)
    assert whole.seen == plain.seen[:2] * 3
    fit(resumed, make(num_workers=num_workers), overfit_batches=2, max_epochs=3, ckpt_path=tmp_path / "step=3.ckpt")
    assert resumed.seen == whole.seen[3:]
    whole.seen.clear()
    fit(whole, loader, max_epochs=2)  # without the flag the same loader goes on
    assert whole.seen[6:] != whole.seen[:6] or make is streams


def test_a_trainer_without_a_dynamic_loader_is_left_alone(tmp_path):
    plain = DataLoader(Points(), 4)
    fit(Linear(), plain).save_checkpoint(tmp_path / "plain.ckpt")
    resumed = Linear()
    fit(resumed, plain, max_epochs=2, ckpt_path=tmp_path / "plain.ckpt")
    assert len(resumed.seen) == 6


def test_workers_end_with_the_fit_and_a_second_one_goes_on():
    loader, module = DynamicLoader(Points(), 4, num_workers=2, steps_per_epoch=9), Linear()
    processes = []

    class Watch(L.Callback):
        def on_train_start(self, trainer, pl_module):
            processes.extend(loader._iterator._workers)

    fit(module, loader, [Watch()])
    assert [w.exitcode for w in processes] == [0, 0]
    fit(module, loader)
    assert [len(set(sum(module.seen[i : i + 6], []))) for i in (0, 6, 12)] == [24] * 3


def test_a_run_that_is_stopped_again_right_after_a_resume_loses_no_micro_batch(tmp_path):
    """A resumed ModelCheckpoint must not save its step again in the middle of the window that comes next."""

    class Stopped(L.Callback):
        def __init__(self, batches):
            self.batches = batches

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.batches -= 1
            if not self.batches:
                raise RuntimeError("taken away")

    def run(module, *more, folder=tmp_path / "stopped", **options):
        saver = ModelCheckpoint(folder, every_n_train_steps=3, save_last=True, filename="{step}")
        fit(module, one_pass(), [saver, *more], max_epochs=3, accumulate_grad_batches=2, enable_checkpointing=True, **options)

    whole = Linear()
    run(whole, folder=tmp_path / "whole")
    modules = [Linear() for _ in range(3)]
    with pytest.raises(RuntimeError, match="taken away"):
        run(modules[0], Stopped(8))
    with pytest.raises(RuntimeError, match="taken away"):
        run(modules[1], Stopped(2), ckpt_path=tmp_path / "stopped" / "last.ckpt")
    run(modules[2], ckpt_path=tmp_path / "stopped" / "last.ckpt")
    assert modules[2].seen == whole.seen[6:]
    assert torch.equal(modules[2].layer.weight, whole.layer.weight)
