"""More than one run: resumed, continued by the same Trainer, begun anew in the same folder or with the same policy."""

import lightning as L
import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatrain.callbacks import (
    LESS,
    ODM,
    LossReweighting,
    LossSelection,
    PolicyError,
    RandomSelection,
    ReplaySelection,
    StaticMixture,
    read_decisions,
)
from tests.callbacks.modules import Linear, Points, fit, points, third


def rows_by_step(folder):
    return np.bincount(read_decisions(folder)["step"].to_numpy()).tolist()


@pytest.mark.parametrize("where", ["same", "other"])
def test_a_resumed_runs_records_hold_each_row_once(where, tmp_path):
    def policies():
        return [LossReweighting(), ODM(domain=third), LossSelection(size=12, every_n_steps=2)]

    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    fit(Linear(), points(40), [*policies(), saver], default_root_dir=tmp_path / "first", enable_checkpointing=True)
    records = {name: rows_by_step(tmp_path / "first/policies" / name / "decisions") for name in ("LossReweighting", "ODM", "LossSelection")}
    assert records["LossReweighting"] == [4] * 10
    again = tmp_path / ("first" if where == "same" else "second")
    fit(Linear(), points(40), policies(), default_root_dir=again, ckpt_path=tmp_path / "saved/step=3.ckpt")
    for name, expected in records.items():
        assert rows_by_step(again / "policies" / name / "decisions") == expected, name


def test_a_new_run_in_the_same_folder_keeps_the_old_records_apart(tmp_path):
    chosen = []
    for seed in (0, 1):
        policy = RandomSelection(size=4, seed=seed)
        fit(Linear(), points(40), [policy], default_root_dir=tmp_path)
        folder = tmp_path / "policies/RandomSelection/decisions"
        chosen.append(read_decisions(folder)["index"].to_pylist())
        assert len(chosen[-1]) == 4
    assert chosen[0] != chosen[1]
    assert read_decisions(folder.with_name("decisions.1"))["index"].to_pylist() == chosen[0]
    module = Linear()
    fit(module, points(40), [ReplaySelection(folder, record=False)])
    assert set(sum(module.seen, [])) == set(chosen[1])


def test_a_dry_run_leaves_no_records(tmp_path):
    fit(Linear(), points(), [RandomSelection(size=4)], fast_dev_run=True, default_root_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["selection", "mixture"])
def test_a_further_fit_of_the_same_trainer_goes_on_under_the_same_decisions(kind):
    policy = RandomSelection(size=4) if kind == "selection" else StaticMixture({"a": 1.0, "b": 0.0, "c": 0.0}, domain=third)
    module = Linear()
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, callbacks=[policy])
    trainer.fit(module, points(40))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, points(40))
    first, second = (set(sum(module.seen[i : i + 10], [])) for i in (0, 10))
    assert len(module.seen) == 20
    assert second <= first
    assert len(first) == (4 if kind == "selection" else 14)
    if kind == "mixture":  # without repeats until the domain is used up, over both fits
        everything = sum(module.seen, [])
        assert all(len(set(everything[i : i + 14])) == 14 for i in range(0, 70, 14))


@pytest.mark.parametrize(
    "make",
    [lambda: LossReweighting(max_updates=3), lambda: ODM(domain=third), lambda: RandomSelection(size=4), lambda: LossSelection(size=4)],
)
def test_a_policy_begins_anew_in_a_new_run(make):
    policy, histories, seen = make(), [], []
    for _ in range(2):
        module = Linear()
        fit(module, points(), [policy])
        histories.append(list(policy.history))
        seen.append(module.seen)
    assert histories[0] == histories[1] != []
    assert seen[0] == seen[1]


@pytest.mark.parametrize("step", [2, 3, 6])
def test_a_checkpoint_that_a_callback_before_the_policy_saved_is_as_good(step, tmp_path):
    class Early(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    def policies():
        return [
            LossReweighting(warmup_steps=1, every_n_steps=2),
            ODM(domain=third, warmup_steps=1),
            LossSelection(size=12, every_n_steps=2),
        ]

    whole, resumed, first, second = Linear(), Linear(), policies(), policies()
    fit(whole, points(40), [Early(), *first])
    fit(resumed, points(40), second, ckpt_path=tmp_path / f"{step}.ckpt")
    assert resumed.seen == whole.seen[step:]
    assert resumed.losses == whole.losses[step:]
    assert [p.history for p in first] == [p.history for p in second]


@pytest.mark.parametrize("kind", ["selection", "mixture"])
def test_a_policy_that_is_new_in_a_resumed_run_acts_when_it_starts(kind, tmp_path):
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    fit(Linear(), points(40), [saver], enable_checkpointing=True)
    policy = RandomSelection(size=4, warmup_steps=2) if kind == "selection" else StaticMixture({"a": 1, "b": 0, "c": 0}, domain=third)
    module = Linear()
    fit(module, points(40), [policy], ckpt_path=tmp_path / "step=4.ckpt")
    assert [step for step, _ in policy.history] == [4]
    seen = sum(module.seen, [])
    assert len(set(seen)) <= 4 if kind == "selection" else {n % 3 for n in seen} == {0}


def test_records_that_cannot_be_written_are_found_at_once(tmp_path):
    (tmp_path / "policies").write_text("a file")
    module = Linear()
    with pytest.raises(PolicyError, match="RandomSelection failed at step 0: .*policies"):
        fit(module, points(), [RandomSelection(size=4)], default_root_dir=tmp_path)
    assert module.seen == []


def test_a_broken_record_does_not_stop_a_resume(tmp_path):
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    fit(Linear(), points(), [RandomSelection(size=4), saver], default_root_dir=tmp_path, enable_checkpointing=True)
    (file,) = (tmp_path / "policies/RandomSelection/decisions").glob("*.parquet")
    file.write_bytes(file.read_bytes()[:20])
    module = Linear()
    with pytest.warns(UserWarning, match="cannot be read, so the records begin with this resume"):
        fit(module, points(), [RandomSelection(size=4)], default_root_dir=tmp_path, ckpt_path=tmp_path / "step=3.ckpt")
    assert len(module.seen) == 3


@pytest.mark.parametrize("gradient", ["adam", "sgd"])
def test_less_with_another_optimizer_than_adam_is_refused_before_training(gradient):
    module = Linear()
    policy = LESS(Points(4), gradient=gradient, size=4, warmup_steps=2, width=16)
    if gradient == "sgd":
        fit(module, points(), [policy])
        return
    with pytest.raises(PolicyError, match=r"LESS failed at step 0: .*SGD trains the model. Use LESS\(gradient='sgd'\)"):
        fit(module, points(), [policy])
    assert module.seen == []


def test_a_loader_that_cannot_be_wrapped_names_the_policy_also_in_a_datamodule():
    class Data(L.LightningDataModule):
        def train_dataloader(self):
            return {"a": points(), "b": points()}

    with pytest.raises(PolicyError, match="RandomSelection failed at step 0: Data policies need one training loader"):
        fit(Linear(), Data(), [RandomSelection(size=3)])


def test_scoring_shows_no_bar_where_the_trainer_shows_none(capsys):
    fit(Linear(), points(), [LossSelection(size=4)])
    assert "sample_losses" not in capsys.readouterr().err
