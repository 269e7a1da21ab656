"""What all policies share: no trace when idle, agreement, state, history, records, errors; in ordinary Lightning projects."""

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, IterableDataset

from lightning_megatrain.callbacks import (
    LESS,
    ODM,
    DoReMi,
    LossReweighting,
    LossSelection,
    Policy,
    PolicyError,
    RandomSelection,
    ReplaySelection,
    Selected,
    SelectionPolicy,
    StaticMixture,
    read_decisions,
)
from lightning_megatrain.datamodules import DynamicLoader
from tests.callbacks.modules import Linear, Llama, Points, Sentences, fit, points, sentences, third, weights


class Recorder(Policy):
    """Notes when it acts."""

    def __init__(self, **policy):
        super().__init__(**policy)
        self.acted = []

    def act(self, trainer, module):
        self.acted.append(trainer.global_step)


class FirstOnes(SelectionPolicy):
    """Chooses the first samples."""

    def select(self, trainer, module, size):
        return Selected(self.agree(trainer, lambda: np.arange(size)))


def idle():
    return [
        RandomSelection(size=4, max_updates=0),
        LossSelection(size=4, max_updates=0),
        LESS(target=Points(4), size=4, max_updates=0),
        StaticMixture(domain=third, max_updates=0),
        ODM(domain=third, max_updates=0),
        DoReMi(reference="nowhere", domain=third, max_updates=0),
        LossReweighting(max_updates=0),
    ]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_policies_that_never_act_leave_losses_and_weights_bit_equal(num_workers):
    """With workers, EMA and each other present."""

    def run(policies):
        module = Linear()
        fit(module, points(num_workers=num_workers), [*policies, EMAWeightAveraging(device="cpu")], max_epochs=2)
        return module

    plain, watched = run([]), run(idle())
    assert plain.seen == watched.seen
    assert plain.losses == watched.losses
    assert torch.equal(weights(plain), weights(watched))


def test_policies_that_never_act_leave_a_language_model_bit_equal():
    def run(policies):
        module = Llama(attention_dropout=0.1)
        fit(module, sentences(), policies, max_epochs=2)
        return module

    idle_ones = [ODM(domain="source", max_updates=0), LossReweighting(max_updates=0, name="other"), LossSelection(size=3, max_updates=0)]
    plain, watched = run([]), run(idle_ones)
    assert plain.losses == watched.losses
    assert torch.equal(weights(plain), weights(watched))


def test_acting_follows_optimizer_steps_not_micro_batches():
    policy = Recorder(warmup_steps=1, every_n_steps=2)
    fit(Linear(), points(), [policy], accumulate_grad_batches=2, max_epochs=3)
    assert policy.acted == [1, 3, 5, 7]  # 9 steps of 2 micro-batches; not at the end, when nothing follows... step 9 is the last
    assert policy.updates == 4


@pytest.mark.parametrize("source", ["loader", "dynamic loader", "datamodule", "module"])
def test_a_policy_drops_into_any_project(source):
    module, loader = Linear(), points()
    given = loader
    if source == "dynamic loader":
        given = DynamicLoader(Points(), 4)
    elif source == "datamodule":
        given = L.LightningDataModule()
        given.train_dataloader = lambda: loader
    elif source == "module":
        module.train_dataloader = lambda: loader
        given = None
    fit(module, given, [FirstOnes(size=6, warmup_steps=2, every_n_steps=0)])
    assert len(module.seen) == 6
    assert set(sum(module.seen[2:], [])) == set(range(6))
    if source == "datamodule":
        assert given.train_dataloader() is loader  # the project is as it was


def test_a_change_is_in_force_at_the_very_next_step_with_workers():
    module = Linear()
    fit(module, points(num_workers=2), [FirstOnes(size=5, warmup_steps=1, every_n_steps=0)])
    assert not set(module.seen[0]) <= set(range(5))
    assert set(sum(module.seen[1:], [])) <= set(range(5))


def test_selection_and_mixture_work_at_once():
    module = Linear()
    shares = {"a": 0.5, "b": 0.5, "c": 0.0}
    fit(module, points(48), [FirstOnes(size=18, every_n_steps=0), StaticMixture(shares, domain=third)])
    seen = np.array(sum(module.seen, []))
    assert seen.max() < 18
    assert np.bincount(seen % 3, minlength=3).tolist() == [24, 24, 0]


def test_a_resumed_run_makes_the_same_decisions_and_sees_the_same_samples(tmp_path):
    def policies():
        return [
            LossSelection(size=12, every_n_steps=3),
            ODM(domain=third, warmup_steps=1, every_n_steps=2),
            LossReweighting(every_n_steps=2),
        ]

    whole = Linear()
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    all_policies = policies()
    fit(whole, points(num_workers=1), [*all_policies, saver], max_epochs=2, enable_checkpointing=True)
    for step in (4, 8):
        resumed, again = Linear(), policies()
        fit(resumed, points(num_workers=1), again, max_epochs=2, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert resumed.seen == whole.seen[step:]
        assert torch.equal(weights(resumed), weights(whole))
        assert [p.history for p in again] == [p.history for p in all_policies]


def test_a_resumed_run_keeps_its_place_although_the_scheduler_asked_for_the_number_of_steps(tmp_path):
    """B: Lightning drops a loader's state when `estimated_stepping_batches` builds the loader early (its issue 20550)."""

    class Scheduled(Linear):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=int(self.trainer.estimated_stepping_batches))]

    whole, resumed = Scheduled(), Scheduled()
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    fit(whole, points(), [Recorder(), saver], enable_checkpointing=True)
    fit(resumed, points(), [Recorder()], ckpt_path=tmp_path / "step=3.ckpt")
    assert resumed.seen == whole.seen[3:]


def test_history_goes_to_the_logger_and_decisions_to_parquet_and_a_figure(tmp_path):
    logger = CSVLogger(tmp_path)
    policy = FirstOnes(size=5, every_n_steps=2, domain=third)
    fit(Linear(), points(), [policy], logger=logger)
    folder = tmp_path / "lightning_logs" / "version_0" / "policies" / "FirstOnes"
    table = read_decisions(folder / "decisions").to_pandas()
    assert table["step"].tolist() == [0] * 5 + [2] * 5 + [4] * 5
    assert table["index"].tolist() == [0, 1, 2, 3, 4] * 3
    assert table["domain"].tolist() == ["a", "b", "c", "a", "b"] * 3
    assert (folder / "history.png").stat().st_size > 1000
    import pandas

    logged = pandas.read_csv(tmp_path / "lightning_logs" / "version_0" / "metrics.csv")
    assert logged["FirstOnes/share/a"].dropna().tolist() == [0.4] * 3
    assert [m["share/a"] for _, m in policy.history] == [0.4] * 3


def test_a_recorded_selection_replays_to_the_same_samples(tmp_path):
    first, second = Linear(), Linear()
    fit(first, points(), [RandomSelection(size=9, every_n_steps=2, seed=3)], default_root_dir=tmp_path, max_epochs=2)
    replay = ReplaySelection(tmp_path / "policies" / "RandomSelection" / "decisions", name="replay")
    fit(second, points(), [replay], default_root_dir=tmp_path, max_epochs=2)
    assert first.seen == second.seen
    assert torch.equal(weights(first), weights(second))


def test_after_a_crash_the_records_hold_each_decision_once(tmp_path):
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    fit(Linear(), points(), [FirstOnes(size=5, every_n_steps=2), saver], enable_checkpointing=True, default_root_dir=tmp_path / "one")
    fit(Linear(), points(), [FirstOnes(size=5, every_n_steps=2)], ckpt_path=tmp_path / "step=3.ckpt", default_root_dir=tmp_path / "two")
    table = read_decisions(tmp_path / "two" / "policies" / "FirstOnes" / "decisions")
    assert table["step"].to_pylist() == [0] * 5 + [2] * 5 + [4] * 5


def test_an_exception_names_the_policy_and_the_step():
    class Broken(Recorder):
        def act(self, trainer, module):
            raise ZeroDivisionError("no luck")

    with pytest.raises(PolicyError, match="mine failed at step 2: no luck") as error:
        fit(Linear(), points(), [Broken(name="mine", warmup_steps=2)])
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_after_an_exception_the_project_is_as_it_came_and_decisions_are_kept(tmp_path):
    class Failing(Linear):
        def on_train_batch_end(self, *args):
            if self.trainer.global_step == 3:
                raise RuntimeError("stop")

        def train_dataloader(self):
            return points()

    module = Failing()
    with pytest.raises(RuntimeError, match="stop"):
        fit(module, None, [FirstOnes(size=5, every_n_steps=1), LossReweighting()], default_root_dir=tmp_path)
    assert not {"training_step", "train_dataloader"} & vars(module).keys()
    table = read_decisions(tmp_path / "policies" / "FirstOnes" / "decisions")
    assert sorted(set(table["step"].to_pylist())) == [0, 1, 2, 3]


def test_the_tuner_may_run_first():
    module = Linear(lr=0.01)
    policy = FirstOnes(size=5, warmup_steps=1)
    options = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(callbacks=[policy], **options)
    loader = points()
    L.pytorch.tuner.Tuner(trainer).lr_find(module, loader, num_training=4)
    module.seen.clear()
    trainer.fit(module, loader)
    assert set(sum(module.seen[1:], [])) <= set(range(5))
    assert trainer.global_step == 6


def test_two_policies_of_one_name_are_refused_with_what_to_write():
    with pytest.raises(MisconfigurationException, match=r"named 'Recorder' .* for example Recorder\(\.\.\., name='Recorder2'\)"):
        fit(Linear(), points(), [Recorder(), Recorder()])
    with pytest.raises(MisconfigurationException, match=r"named 'mine' \(Recorder, FirstOnes\)"):  # they would share a folder
        fit(Linear(), points(), [Recorder(name="mine"), FirstOnes(size=4, name="mine")])


def test_two_policies_of_one_class_find_their_own_state_on_resume(tmp_path):
    def policies():
        return [
            StaticMixture({"a": 1, "b": 1, "c": 0}, domain=third, max_updates=2, every_n_steps=2),
            StaticMixture({"a": 0, "b": 0, "c": 1}, domain=third, warmup_steps=3, name="later"),
            LossReweighting(every_n_steps=2),
            LossReweighting("quadratic", warmup_steps=1, every_n_steps=3, name="second"),
        ]

    whole, all_policies = Linear(), policies()
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    fit(whole, points(48), [*all_policies, saver], enable_checkpointing=True, default_root_dir=tmp_path / "whole")
    assert {i % 3 for i in sum(whole.seen[:3], [])} == {0, 1}
    assert {i % 3 for i in sum(whole.seen[3:], [])} == {2}
    resumed, again = Linear(), policies()
    shuffled = [again[i] for i in (3, 1, 2, 0)]
    fit(resumed, points(48), shuffled, ckpt_path=tmp_path / "step=4.ckpt", default_root_dir=tmp_path / "resumed")
    assert resumed.seen == whole.seen[4:]
    torch.testing.assert_close(weights(resumed), weights(whole))  # their weights are multiplied in another order
    assert [p.updates for p in again] == [p.updates for p in all_policies] == [2, 1, 6, 4]
    for p, q in zip(again, all_policies, strict=True):
        assert p.history == q.history
        records = [read_decisions(tmp_path / run / "policies" / p.name / "decisions") for run in ("whole", "resumed")]
        assert records[0].num_rows
        assert all(records[0][column].equals(records[1][column]) for column in ("step", "index", "domain", "weight"))


def test_a_mixture_without_domains_is_refused_and_shown_the_three_forms():
    with pytest.raises(PolicyError, match=r'StaticMixture failed at step 0(.|\n)*domain="source"(.|\n)*one dataset per name'):
        fit(Linear(), points(), [StaticMixture()])


def test_what_cannot_be_wrapped_is_refused_with_what_to_change():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([Points()[0]] * 8)

    with pytest.raises(PolicyError, match="Return a `DynamicLoader`"):
        fit(Linear(), DataLoader(Stream(), 4), [RandomSelection(size=3)])
    with pytest.raises(PolicyError, match="one training loader"):
        fit(Linear(), {"a": points(), "b": points()}, [RandomSelection(size=3)])
    with pytest.raises(PolicyError, match="cannot be chosen by index"):
        fit(Linear(), DynamicLoader(Stream(), 4, steps_per_epoch=2), [RandomSelection(size=3)])


@pytest.mark.parametrize(
    "policy", [FirstOnes(size=5), StaticMixture(domain=third), ODM(domain=third, warmup_steps=9), DoReMi("here", domain=third)]
)
def test_overfit_batches_is_refused_beside_a_policy_that_chooses_other_samples(policy, monkeypatch):
    monkeypatch.setattr("lightning_megatrain.callbacks.mixture.doremi._load_reference", lambda *_: Linear())
    with pytest.raises(PolicyError, match=rf"overfit_batches=2 trains .* but {policy.name} chooses others.*limit_train_batches"):
        fit(Linear(), points(), [policy], overfit_batches=2)


def test_a_reweighting_and_idle_policies_leave_overfit_batches_alone():
    module = Linear()
    fit(module, points(), [LossReweighting(), *idle()[:-1]], overfit_batches=2, max_epochs=3)
    assert module.seen == [[0, 1, 2, 3], [4, 5, 6, 7]] * 3


def test_aiming_at_the_data_that_is_monitored_warns_once():
    class Validated(Llama):
        def train_dataloader(self):
            return sentences()

        def val_dataloader(self):
            return DataLoader(self.held_out, 4)

    module = Validated()
    module.held_out = Sentences(8, seed=5)
    less = LESS(target="held_out", size=4, warmup_steps=1, every_n_steps=0, width=64)
    with pytest.warns(UserWarning, match="LESS aims at data that a validation loader also uses.*'val_loss' is monitored") as caught:
        fit(module, None, [less, ModelCheckpoint(monitor="val_loss")], enable_checkpointing=True, max_epochs=2)
    assert len([w for w in caught if "aims at data" in str(w.message)]) == 1


def test_progress_and_schedulers_see_the_true_number_of_steps():
    class Counting(Linear):
        def configure_optimizers(self):
            self.estimated = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    module = Counting()
    trainer = fit(module, points(26), [FirstOnes(size=5, every_n_steps=3)], max_epochs=2, accumulate_grad_batches=2)
    assert trainer.global_step == module.estimated == 8  # 7 batches an epoch, 4 steps
    assert trainer.num_training_batches == 7


def test_nothing_is_decided_when_nothing_is_left_to_train(tmp_path):
    """Resumed from the last step of the last epoch; with an epoch more, it acts where the run that went on would have."""
    every_step = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    first, again, longer = Recorder(every_n_steps=1), Recorder(every_n_steps=1), Recorder(every_n_steps=1)
    fit(Linear(), points(), [first, every_step], max_epochs=2, enable_checkpointing=True)
    last = len(first.acted)
    fit(Linear(), points(), [again], max_epochs=2, ckpt_path=tmp_path / f"step={last}.ckpt")
    fit(Linear(), points(), [longer], max_epochs=3, ckpt_path=tmp_path / f"step={last}.ckpt")
    assert first.acted == list(range(last))
    assert again.acted == []
    assert longer.acted == list(range(last, last * 3 // 2))
