"""LESS: influence by projected gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatrain import model_ops
from lightning_megatrain.callbacks import LESS, PolicyError, read_decisions
from lightning_megatrain.callbacks.selection.less import influence
from lightning_megatrain.callbacks.selection.selection import highest
from lightning_megatrain.callbacks.target import find_target
from tests.callbacks.modules import Llama, Sentences, fit, sentences, weights


def test_influence_is_the_mean_cosine_with_each_sub_task():
    train = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 4.0]])
    tasks = [torch.tensor([[2.0, 0.0], [0.0, 5.0]]), torch.tensor([[0.0, -1.0]])]
    expected = torch.tensor([[0.5, 0.0], [0.5, -1.0], [0.7, -0.8]], dtype=torch.float64)
    torch.testing.assert_close(influence(train, tasks), expected)  # defaults for FP64


@given(st.floats(0.01, 100), st.integers(0, 100))
def test_influence_does_not_depend_on_the_length_of_gradients(scale, seed):
    generator = torch.Generator().manual_seed(seed)
    train, task = torch.randn(5, 8, generator=generator), torch.randn(3, 8, generator=generator)
    torch.testing.assert_close(influence(train * scale, [task]), influence(train, [task]), rtol=1e-5, atol=1e-6)  # FP32 inputs


def test_a_sample_without_gradient_has_no_influence():
    assert influence(torch.zeros(1, 4), [torch.ones(2, 4)]).item() == 0


def test_of_equal_scores_the_earlier_sample_is_chosen():
    assert highest(np.array([1.0, 3.0, 3.0, 2.0, 3.0]), 2).tolist() == [1, 2]
    with pytest.raises(ValueError, match="1 of 2 scores are NaN"):
        highest(np.array([1.0, np.nan]), 1)


def dense_cosines(module, optimizer, train, target, rows_train, rows_target):
    """Equation 3 by hand: whole gradients of one sample after another, no projection."""
    module.eval()

    def gradient(dataset, i):
        module.zero_grad()
        sample = dataset[i]
        module.model(input_ids=sample["input_ids"][None], labels=sample["labels"][None]).loss.backward()
        return {p: p.grad.clone() for p in module.parameters()}

    def adam(g):
        out = []
        for p in module.parameters():
            state, group = optimizer.state[p], optimizer.param_groups[0]
            (b1, b2), t = group["betas"], int(state["step"]) + 1
            m = (b1 * state["exp_avg"] + (1 - b1) * g[p]) / (1 - b1**t)
            v = (b2 * state["exp_avg_sq"] + (1 - b2) * g[p] ** 2) / (1 - b2**t)
            out.append((m / (v + group["eps"]).sqrt()).flatten())
        return torch.cat(out)

    t = torch.stack([adam(gradient(train, i)) for i in range(rows_train)])
    e = torch.stack([torch.cat([g.flatten() for g in gradient(target, i).values()]) for i in range(rows_target)])
    t, e = t / t.norm(dim=1, keepdim=True), e / e.norm(dim=1, keepdim=True)
    return (t @ e.T).mean(1)


def test_scores_are_the_papers_with_betas_and_eps_of_the_optimizer(tmp_path):
    """B24 hard-coded betas and eps; B26 dropout on while scoring; LESS's eps stands inside the root."""
    less = LESS(target=Sentences(4, seed=9), size=16, warmup_steps=3, every_n_steps=0, width=65536, projection="dense")
    taken = {}

    class Watch(LESS):
        def select(self, trainer, module, size):
            taken["state"] = {k: v.clone() for k, v in module.state_dict().items()}
            taken["optimizer"] = trainer.optimizers[0]
            selected = super().select(trainer, module, size)
            taken["expected"] = dense_cosines(module, trainer.optimizers[0], Sentences(), Sentences(4, seed=9), 16, 4)
            module.train()
            return selected

    less.__class__ = Watch
    module = Llama(optimizer=lambda p, lr: torch.optim.AdamW(p, lr=lr, betas=(0.8, 0.95), eps=1e-6), attention_dropout=0.3)
    fit(module, sentences(), [less], default_root_dir=tmp_path)
    table = read_decisions(_records(tmp_path))
    scores = torch.zeros(16, dtype=torch.float64)
    scores[table["index"].to_numpy().copy()] = torch.tensor(table["score"].to_numpy().copy())
    # Johnson-Lindenstrauss: a projected cosine is off by about 1 / sqrt(65536) = 0.004, a mean of four by half of it or more; 4 sigma
    assert (scores - taken["expected"].double()).abs().max() < 0.016
    assert torch.corrcoef(torch.stack([scores, taken["expected"].double()]))[0, 1] > 0.95


def _records(folder):
    return next((folder / "policies").glob("*/decisions"))


@pytest.mark.parametrize("gradient", ["adam", "sgd"])
def test_scoring_leaves_training_as_it_was(gradient):
    """B1, B3e: the published scoring left gradients behind, or trained the model. With all samples chosen nothing but the order changes."""

    def run(policies):
        module = Llama(attention_dropout=0.2)
        fit(module, sentences(shuffle=False), policies, max_epochs=1)
        return module

    less = LESS(target=Sentences(4, seed=9), size=8, warmup_steps=2, every_n_steps=0, gradient=gradient, width=256)
    plain, scored = run([]), run([less])
    assert less.updates == 1
    assert plain.losses[:2] == scored.losses[:2]
    less_again = LESS(target=Sentences(4, seed=9), size=8, warmup_steps=2, every_n_steps=0, gradient=gradient, width=256)
    less_again.act = lambda trainer, module: less_again.select(trainer, module, 8) and None  # scores, then changes nothing
    untouched = run([less_again])
    assert untouched.losses == plain.losses
    assert torch.equal(weights(untouched), weights(plain))


class Counting(torch.utils.data.Dataset):
    """Rows that count up or down, in a range of eight tokens."""

    def __init__(self, n, first, step, seed):
        starts = torch.randint(8, (n, 1), generator=torch.Generator().manual_seed(seed))
        self.ids = first + (starts + step * torch.arange(8)) % 8

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


@pytest.mark.parametrize("projection", ["dense", "factored"])
def test_it_chooses_the_samples_of_the_targets_kind(projection):
    data = torch.utils.data.ConcatDataset([Counting(12, 0, 1, seed=1), Counting(12, 16, -1, seed=2)])
    less = LESS(target=Counting(6, 16, -1, seed=3), size=12, every_n_steps=0, width=1024, gradient="sgd", projection=projection)
    trainer = fit(Llama(), torch.utils.data.DataLoader(data, 4, shuffle=True), [less])
    assert sorted(trainer.train_dataloader.pool) == list(range(12, 24))


def test_of_several_sub_tasks_the_best_one_counts():
    tasks = {"low": Sentences(4, seed=5, high=16), "high": Sentences(4, seed=6, low=16)}
    module = Llama(lr=1e-3)
    policy = LESS(target=tasks, size=16, warmup_steps=1, every_n_steps=0, width=256, gradient="sgd")
    seen = {}

    class Watch(LESS):
        def select(self, trainer, module, size):
            selected = super().select(trainer, module, size)
            ask = {n: LESS(target=t, size=16, every_n_steps=0, width=256, gradient="sgd") for n, t in tasks.items()}
            for n, p in ask.items():
                p._loader = self._loader
                one = p.select(trainer, module, size)
                seen[n] = one.score[np.argsort(one.index)]
            seen["both"] = selected.score[np.argsort(selected.index)]
            return selected

    policy.__class__ = Watch
    fit(module, sentences(), [policy])
    np.testing.assert_allclose(seen["both"], np.maximum(seen["low"], seen["high"]), rtol=1e-9)


def test_all_checkpoints_are_summed_with_their_learning_rates():
    """Equation 3: sum over checkpoints of the average learning rate times the cosine."""
    seen = []

    class Scheduled(Llama):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s)), "interval": "step"}]

    class Watch(LESS):
        def select(self, trainer, module, size):
            latest = LESS(target=self.target, size=16, warmup_steps=1, every_n_steps=0, width=256)
            latest._loader = self._loader
            one = latest.select(trainer, module, size)
            selected = super().select(trainer, module, size)
            seen.append((one.score[np.argsort(one.index)], selected.score[np.argsort(selected.index)]))
            return selected

    policy = Watch(target=Sentences(4, seed=9), size=16, warmup_steps=2, every_n_steps=1, max_updates=2, checkpoints="all", width=256)
    fit(Scheduled(), sentences(), [policy])
    (first, sum_1), (second, sum_2) = seen
    rate_1, rate_2 = 1e-2 * (1 + 1 / 2) / 2, 1e-2 / 3  # of steps 1 and 2; of step 3
    np.testing.assert_allclose(sum_1, rate_1 * first, rtol=1e-6)
    np.testing.assert_allclose(sum_2, rate_1 * first + rate_2 * second, rtol=1e-6)


def test_b10_a_store_gives_back_what_was_computed_before_a_crash(tmp_path, monkeypatch):
    calls = []
    plain = model_ops.gradient_features

    def counting(module, batch, settings):
        calls.append(len(batch["input_ids"]))
        if len(calls) == fail_at:
            raise KeyboardInterrupt
        return plain(module, batch, settings)

    monkeypatch.setattr(model_ops, "gradient_features", counting)
    monkeypatch.setattr("lightning_megatrain.callbacks.selection.less.model_ops.gradient_features", counting)

    def run():
        calls.clear()
        less = LESS(target=Sentences(4, seed=9), size=8, warmup_steps=2, every_n_steps=0, width=64, store=str(tmp_path / "store"))
        return fit(Llama(), sentences(), [less])

    fail_at = 5  # in the target's only batch, after the four of the training samples
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run()
    fail_at = -1
    pool = run().train_dataloader.pool
    assert calls == [4]  # the target only
    monkeypatch.undo()
    less = LESS(target=Sentences(4, seed=9), size=8, warmup_steps=2, every_n_steps=0, width=64)
    assert fit(Llama(), sentences(), [less]).train_dataloader.pool.tolist() == pool.tolist()


def test_targets_are_found_by_name():
    class Module:
        held_out = Sentences(3)
        tasks = {"one": Sentences(2), "two": Sentences(2)}

        def make(self):
            return sentences(5)

    class Trainer:
        datamodule = None
        lightning_module = Module()

    assert find_target("held_out", Trainer).keys() == {"target"}
    assert find_target("tasks", Trainer).keys() == {"one", "two"}
    assert len(find_target("tasks.two", Trainer)["target"].dataset) == 2
    assert len(find_target("make", Trainer)["target"].dataset) == 5
    with pytest.raises(ValueError, match="no target 'dev': give Module an attribute"):
        find_target("dev", Trainer)
    with pytest.raises(TypeError, match="map-style"):
        find_target(iter([1]), Trainer)


def test_a_missing_target_is_refused_before_training():
    module = Llama()
    with pytest.raises(PolicyError, match="no target 'dev'"):
        fit(module, sentences(), [LESS(target="dev", size=4, warmup_steps=2, every_n_steps=0)])
    assert module.losses == []


def test_adam_gradients_without_warm_up_are_refused():
    with pytest.raises(ValueError, match="`warmup_steps="):
        LESS(target=Sentences(2), size=3, every_n_steps=0)
