"""Two processes on gloo: the same decisions, each sample once, the gradient of the joint batch."""

import numpy as np
import pytest
import torch

from lightning_megatrain.callbacks import LESS, ODM, DoReMi, LossReweighting, LossSelection, PolicyError, RandomSelection
from lightning_megatrain.datamodules import DynamicLoader
from tests.callbacks.modules import Linear, Llama, Points, Sentences, fit, points, sentences, third, weights

pytestmark = pytest.mark.long  # each starts two processes


def policy_of(kind, folder):
    if kind == "DoReMi":
        return DoReMi(str(folder / "reference.ckpt"), domain="source")
    return {
        "RandomSelection": lambda: RandomSelection(size=16, every_n_steps=2),
        "LossSelection": lambda: LossSelection(size=16, every_n_steps=2),
        "ODM": lambda: ODM(domain="source", warmup_steps=1, reward_scale=30.0),
        "LossReweighting": lambda: LossReweighting("extremes", length_normalised=False),
        "LESS": lambda: LESS(target=Sentences(3, seed=9), size=16, warmup_steps=1, every_n_steps=2, width=256),
    }[kind]()


class Saving(Llama):
    """Writes what a rank saw and decided; equal lengths, so that ranks hold equally many tokens."""

    def __init__(self, folder, policy):
        super().__init__()
        self.folder, self.policy, self.seen = folder, policy, []

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(self.trainer.train_dataloader.last.index.tolist())

    def on_fit_end(self):
        out = {"seen": self.seen, "weights": weights(self), "history": self.policy.history}
        torch.save(out, self.folder / f"{self.trainer.world_size}-{self.trainer.global_rank}.pt")


class Full(Sentences):
    def __init__(self, n=32):
        super().__init__(n)
        self.lengths[:] = 8


@pytest.mark.parametrize("kind", ["RandomSelection", "LossSelection", "ODM", "LossReweighting", "DoReMi", "LESS"])
def test_two_ranks_do_what_one_process_does_with_the_joint_batch(kind, tmp_path):
    torch.save({"state_dict": Llama(seed=5).state_dict()}, tmp_path / "reference.ckpt")
    for devices in (1, 2):
        policy = policy_of(kind, tmp_path)
        loader = DynamicLoader(Full(), 8 // devices, seed=4, domain="source")
        strategy = "ddp_fork" if devices == 2 else "auto"
        fit(Saving(tmp_path, policy), loader, [policy], devices=devices, strategy=strategy, max_epochs=2)
    one, *two = (torch.load(tmp_path / f"{n}.pt", weights_only=False) for n in ("1-0", "2-0", "2-1"))
    assert two[0]["history"] == two[1]["history"]
    assert torch.equal(two[0]["weights"], two[1]["weights"])
    assert [a + b for a, b in zip(two[0]["seen"], two[1]["seen"], strict=True)] == one["seen"]
    for (step, a), (other, b) in zip(one["history"], two[0]["history"], strict=True):
        assert step == other
        np.testing.assert_allclose([b[k] for k in a], list(a.values()), rtol=1e-4, atol=1e-6)
    # means over 4 + 4 samples instead of 8, through eight Adam steps
    torch.testing.assert_close(two[0]["weights"], one["weights"], rtol=1e-3, atol=1e-4)


class SavingPoints(Linear):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_fit_end(self):
        torch.save({"seen": self.seen, "weights": weights(self)}, self.folder / f"{self.trainer.global_rank}.pt")


def test_a_plain_loader_is_shared_by_the_ranks_as_lightning_would(tmp_path):
    runs = []
    for policies in ([], [RandomSelection(size=4, max_updates=0)]):
        fit(SavingPoints(tmp_path), points(), policies, devices=2, strategy="ddp_fork", max_epochs=2)
        runs.append([torch.load(tmp_path / f"{r}.pt", weights_only=False) for r in (0, 1)])
    for plain, watched in zip(*runs, strict=True):
        assert plain["seen"] == watched["seen"]
        assert torch.equal(plain["weights"], watched["weights"])
    epoch = [sum(r["seen"][:3], []) for r in runs[1]]
    assert sorted(epoch[0] + epoch[1]) == list(range(24))


def test_b7_two_ranks_that_see_different_losses_agree(tmp_path):
    class Unlike(SavingPoints):
        def training_step(self, batch, batch_idx):
            out = super().training_step(batch, batch_idx)
            return {**out, "sample_losses": 1.0 + 5 * self.trainer.global_rank * (batch[0][:, 0].round() % 3 == 1)}

        def on_fit_end(self):
            super().on_fit_end()
            torch.save(self.trainer.train_dataloader.proportions, self.folder / f"shares-{self.trainer.global_rank}.pt")

    fit(Unlike(tmp_path), points(48), [ODM(domain=third, reward_scale=30.0)], devices=2, strategy="ddp_fork")
    first, second = (torch.load(tmp_path / f"shares-{r}.pt") for r in (0, 1))
    assert first == second
    assert first["b"] > max(first["a"], first["c"])


def test_a_rank_without_a_share_does_not_hang(tmp_path):
    """One target sample for two ranks."""
    policy = LESS(target=Sentences(1, seed=9), size=4, warmup_steps=1, every_n_steps=0, width=64)
    fit(Saving(tmp_path, policy), sentences(), [policy], devices=2, strategy="ddp_fork")
    assert (tmp_path / "2-1.pt").exists()


def test_a_failure_to_decide_on_rank_0_stops_both_ranks():
    class Broken(RandomSelection):
        def select(self, trainer, module, size):
            def decide():
                raise ValueError("no luck")

            return self.agree(trainer, decide)

    with pytest.raises(Exception, match="Broken failed at step 0.*no luck") as error:
        fit(Linear(), DynamicLoader(Points(), 4), [Broken(size=4)], devices=2, strategy="ddp_fork")
    assert "PolicyError" in str(error.value) or isinstance(error.value, PolicyError)
