"""Policies under strategy="megatrain": the same decisions as under plain Lightning."""

import numpy as np
import pytest
import torch

from lightning_megatrain.callbacks import LESS, ODM, DoReMi, LossReweighting, LossSelection
from tests.callbacks.modules import Llama, Sentences, fit, sentences, weights


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


@pytest.mark.parametrize("kind", ["LESS", "LossSelection", "ODM", "DoReMi", "LossReweighting"])
def test_decisions_are_those_under_plain_lightning(kind, tmp_path):
    runs = []
    for strategy in ("auto", "megatrain"):
        module, policy = Llama(), policy_of(kind, tmp_path)
        fit(module, sentences(), [policy], strategy=strategy, max_epochs=2)
        runs.append((module, policy))
    (plain, first), (streamed, second) = runs
    assert [step for step, _ in first.history] == [step for step, _ in second.history]
    for (_, a), (_, b) in zip(first.history, second.history, strict=True):
        assert a.keys() == b.keys()
        # the optimizer's kernel differs from plain torch's in the last bit of FP32
        np.testing.assert_allclose([b[k] for k in a], list(a.values()), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(streamed.losses, plain.losses, rtol=1e-5)
    torch.testing.assert_close(weights(streamed), weights(plain), rtol=1e-4, atol=1e-5)  # eight Adam steps of that
    assert len(first.history) > 2
