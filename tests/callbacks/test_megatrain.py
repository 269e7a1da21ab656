"""Policies under strategy="megatrain": the same decisions as under plain Lightning."""

from contextlib import nullcontext

import pytest
import torch

from lightning_megatrain import MegaTrainStrategy
from lightning_megatrain.callbacks import LESS, ODM, DoReMi, LossReweighting, LossSelection
from tests.callbacks.modules import Llama, Sentences, fit, sentences, weights
from tests.emulated import EmulatedAccelerator, emulated_device


def policy_of(kind, tmp_path):
    if kind == "DoReMi":
        torch.save({"state_dict": Llama(seed=5).state_dict()}, tmp_path / "reference.ckpt")
        return DoReMi(str(tmp_path / "reference.ckpt"), domain="source")
    return {
        "LESS": lambda: LESS(target=Sentences(4, seed=9), size=8, warmup_steps=1, every_n_steps=2, width=256),
        "LossSelection": lambda: LossSelection(size=8, every_n_steps=2),
        "ODM": lambda: ODM(domain="source", warmup_steps=1),
        "LossReweighting": lambda: LossReweighting("extremes"),
    }[kind]()


@pytest.mark.parametrize("place", ["cpu", "emu"])
@pytest.mark.parametrize("kind", ["LESS", "LossSelection", "ODM", "DoReMi", "LossReweighting"])
def test_decisions_are_those_under_plain_lightning(kind, place, tmp_path):
    def run(**trainer):
        module, policy = Llama(), policy_of(kind, tmp_path)
        fit(module, sentences(), [policy], max_epochs=2, **trainer)
        return module, policy

    runs = [run()]
    with emulated_device("lazy") if place == "emu" else nullcontext():
        accelerator = EmulatedAccelerator() if place == "emu" else "cpu"
        # the fused kernel may differ in the last bit
        runs.append(run(accelerator=accelerator, strategy=MegaTrainStrategy(fused_optimizer=False)))
    (plain, first), (streamed, second) = runs
    assert [step for step, _ in first.history] == [step for step, _ in second.history]
    for (_, a), (_, b) in zip(first.history, second.history, strict=True):
        assert a == b
    assert streamed.losses == plain.losses
    assert torch.equal(weights(streamed), weights(plain))
    assert len(first.history) > 2
