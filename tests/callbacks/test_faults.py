"""Faults of published code that could exist here, each by its number in the notes, where no other test names it."""

import numpy as np
import pytest
import torch

from lightning_megatrain.callbacks import ODM, LossReweighting, LossSelection, PolicyError, RandomSelection, StaticMixture
from lightning_megatrain.datamodules import DynamicLoader
from tests.callbacks.modules import Linear, Llama, Points, fit, points, sentences, third, weights


def test_b4_accumulation_starts_afresh_in_each_epoch():
    """Published, with 10 batches and accumulation 4, steps later ended on a batch that did not synchronise."""

    class Counted(Linear):
        def __init__(self):
            super().__init__()
            self.stepped = []

        def on_before_optimizer_step(self, optimizer):
            self.stepped.append((self.trainer.current_epoch, self.trainer.fit_loop.epoch_loop.batch_idx))

    for policies in ([], [LossReweighting()]):
        module = Counted()
        fit(module, points(40), policies, accumulate_grad_batches=4, max_epochs=2)
        assert module.stepped == [(e, b) for e in (0, 1) for b in (3, 7, 9)]


def test_b13_workers_work():
    fit(Linear(), points(num_workers=1), [LossSelection(size=8, every_n_steps=2)])


def test_b19_random_choices_differ_and_leave_the_global_generators_alone():
    """Published, the random mixer gives the same vector each time and seeds NumPy's global generator."""
    np.random.seed(7)
    expected = np.random.random()
    np.random.seed(7)
    module = Linear()
    fit(module, DynamicLoader(Points(64), 4), [RandomSelection(size=8, every_n_steps=2)])
    assert np.random.random() == expected
    chunks = [frozenset(sum(module.seen[i : i + 2], [])) for i in range(0, 16, 2)]
    assert len(set(chunks)) == 8


def test_b22_draws_come_from_the_seed_alone():
    runs = []
    for noise in (0, 1):
        np.random.seed(noise)
        module = Linear()
        fit(module, DynamicLoader(Points(64), 4), [LossSelection(size=8, every_n_steps=2)])
        runs.append(module.seen)
    assert runs[0] == runs[1]


def test_b1_b26_scoring_leaves_mode_gradients_and_random_numbers():
    class Watched(Llama):
        def on_after_backward(self):
            self.before = torch.get_rng_state(), [p.grad.clone() for p in self.parameters()]

    class Check(LossSelection):
        def act(self, trainer, module):
            modes = [m.training for m in module.modules()]
            state, grads = torch.get_rng_state(), [p.grad for p in module.parameters()]
            super().act(trainer, module)
            assert [m.training for m in module.modules()] == modes
            assert all(modes)
            assert torch.equal(torch.get_rng_state(), state)
            assert all(p.grad is g for p, g in zip(module.parameters(), grads, strict=True))

    policy = Check(size=8, warmup_steps=1, every_n_steps=1)
    fit(Watched(attention_dropout=0.5), sentences(), [policy])
    assert policy.updates > 1


def test_r2_a_pool_that_is_used_up_begins_again():
    """Published, a run of 24 steps stops silently after 12."""
    module = Linear()
    fit(module, points(48), [RandomSelection(size=8, every_n_steps=0)])
    assert len(module.seen) == 12
    assert all(sorted(sum(module.seen[i : i + 2], [])) == sorted(sum(module.seen[:2], [])) for i in range(0, 12, 2))


def test_l1_without_a_decision_the_pool_goes_on_and_is_not_replayed():
    module = Linear()
    fit(module, points(48), [RandomSelection(size=24, every_n_steps=0)])
    assert len(set(sum(module.seen[:6], []))) == 24
    assert module.seen[:6] != module.seen[6:]


def test_l2_a_selection_in_order_keeps_the_proportions():
    """Published, a reordered pool served one domain first."""

    class Sorted(RandomSelection):
        def select(self, trainer, module, size):
            from lightning_megatrain.callbacks import Selected

            return Selected(np.array(sorted(range(48), key=lambda i: i % 3)), ordered=True)

    module = Linear()
    fit(module, points(48), [Sorted(size=48, every_n_steps=0), StaticMixture(domain=third)])
    for i in range(0, 12, 3):
        counts = np.bincount(np.array(sum(module.seen[i : i + 3], [])) % 3, minlength=3)
        assert counts.min() >= 3, counts  # of 12


def test_l11_misspelt_arguments_are_refused():
    with pytest.raises(TypeError, match="evrey_n_steps"):
        RandomSelection(size=3, evrey_n_steps=2)


def test_h2_the_epoch_stays_the_trainers():
    """Published, an epoch became as long as a warm-up."""
    trainer = fit(Linear(), points(40), [RandomSelection(size=4, warmup_steps=2, every_n_steps=3)], max_epochs=3)
    assert (trainer.current_epoch, trainer.global_step) == (3, 30)


def test_4b_loaders_do_not_pile_up():
    """Published, every choice adds a loader. Here one serves all along."""
    seen = set()

    class Watch(Linear):
        def on_train_batch_start(self, batch, batch_idx):
            seen.add(id(self.trainer.train_dataloader))

    fit(Watch(), points(), [LossSelection(size=8, every_n_steps=1)], max_epochs=2)
    assert len(seen) == 1


def test_reloading_the_loader_is_refused():
    with pytest.raises(PolicyError, match="reload_dataloaders_every_n_epochs=1"):
        fit(Linear(), points(), [RandomSelection(size=3)], reload_dataloaders_every_n_epochs=1)


def test_a_run_cut_short_by_limit_train_batches_resumes_with_a_new_epoch(tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    def run(ckpt_path=None):
        module, saver = Linear(), ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        loader = DynamicLoader(Points(), 4, domain=third)
        options = {"max_epochs": 3, "limit_train_batches": 4, "enable_checkpointing": True}
        fit(module, loader, [ODM(), saver], ckpt_path=ckpt_path, **options)
        return module

    whole = run()
    resumed = run(tmp_path / "epoch=0.ckpt")
    assert resumed.seen == whole.seen[4:]
    assert torch.equal(weights(resumed), weights(whole))


def test_fitting_twice_goes_on():
    module, policy = Linear(), RandomSelection(size=8, every_n_steps=2)
    trainer = fit(module, points(), [policy])
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, points())
    assert len(module.seen) == 12
    assert policy.updates == 6
