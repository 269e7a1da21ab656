"""Two processes on gloo train as one, however many tokens each of them has."""

import lightning as L
import pytest
import torch

from tests.language_model.test_causal_lm import LENGTHS, SGD, fit, loader, make_model, make_rows, make_trainer

pytestmark = pytest.mark.long  # each starts two processes


class _OwnRows(L.LightningDataModule):
    """Gives each process its own rows, with unequal numbers of tokens."""

    def train_dataloader(self):
        return loader(make_rows(LENGTHS[:8])[self.trainer.global_rank :: self.trainer.world_size], 2)


class _SaveGradients(L.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        torch.save({name: p.grad for name, p in pl_module.named_parameters()}, f"gradients{trainer.global_rank}.pt")


def test_the_gradient_does_not_depend_on_how_rows_are_spread_over_processes():
    whole, _ = fit(make_rows(LENGTHS[:8]), 8, 1)
    trainer = make_trainer(
        strategy="ddp_fork",
        devices=2,
        accumulate_grad_batches=2,
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=[_SaveGradients()],
    )
    trainer.fit(make_model(**SGD), _OwnRows())
    for rank in range(2):
        for name, gradient in torch.load(f"gradients{rank}.pt").items():
            torch.testing.assert_close(gradient, whole.gradients[0][name], rtol=0, atol=1e-6)


def test_two_processes_with_sliced_logits_train_as_one():
    module = make_model(loss_slice=5, **SGD)
    trainer = make_trainer(strategy="ddp_fork", devices=2, max_epochs=1, use_distributed_sampler=True)
    rows = make_rows([12] * 4)
    trainer.fit(module, loader(rows, 1))
    one = make_model(loss_slice=None, **SGD)
    make_trainer(max_epochs=1).fit(one, loader(rows, 2))
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(dict(module.named_parameters())[name], parameter, rtol=0, atol=1e-6)
