"""Policies under strategy="megatrain": the same decisions as under plain Lightning."""

import functools
from contextlib import nullcontext

import pytest
import torch

from lightning_megatrain import MegaTrainStrategy
from lightning_megatrain.callbacks import LESS, ODM, DoReMi, LossReweighting, LossSelection
from lightning_megatrain.model_ops import projection
from tests.callbacks.modules import Llama, Sentences, fit, sentences, tiny_llama, weights
from tests.emulated import DEVICE, EmulatedAccelerator, emulated_device


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


def train(kind, folder, **trainer):
    """Returns the losses, the weights and the policy's history of a run."""
    module, policy = Llama(), policy_of(kind, folder)
    fit(module, sentences(), [policy], max_epochs=2, **trainer)
    return module.losses, weights(module), policy.history


@pytest.fixture(scope="module")
def train_plain(tmp_path_factory):
    """Trains under plain Lightning, once for all places."""
    return functools.cache(lambda kind: train(kind, tmp_path_factory.mktemp("plain")))


@pytest.mark.parametrize("place", ["cpu", "emu"])
@pytest.mark.parametrize("kind", ["LESS", "LossSelection", "ODM", "DoReMi", "LossReweighting"])
def test_decisions_are_those_under_plain_lightning(kind, place, tmp_path, train_plain):
    losses, weights, history = train_plain(kind)
    with emulated_device("lazy") if place == "emu" else nullcontext():
        accelerator = EmulatedAccelerator() if place == "emu" else "cpu"
        # the fused kernel may differ in the last bit
        streamed = train(kind, tmp_path, accelerator=accelerator, strategy=MegaTrainStrategy(fused_optimizer=False))
    assert streamed[2] == history
    assert streamed[0] == losses
    assert torch.equal(streamed[1], weights)
    assert len(history) > 2


@pytest.mark.long
@pytest.mark.parametrize("kind", ["LESS", "LossSelection", "DoReMi"])
def test_device_memory_while_scoring_grows_with_the_model_by_the_saved_inputs_alone(kind, tmp_path, monkeypatch):
    """Three layers more, in a whole run: their inputs are on the device, and none of their weights, gradients or sign matrices."""
    monkeypatch.setattr(projection, "MAX_ELEMENTS", 2**12)  # blocks of 16 KiB, below a layer's 160 KiB
    tiny_llama(seed=5).save_pretrained(tmp_path / "reference")  # of one size whatever the model's depth
    size = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 32}

    def peaks(layers):
        policy = DoReMi(str(tmp_path / "reference"), domain="source") if kind == "DoReMi" else policy_of(kind, tmp_path)
        module, scoring = Llama(num_hidden_layers=layers, **size), []
        # DoReMi scores inside the training step, whose saved inputs are there as well; the others between two steps.
        name = "_excess" if kind == "DoReMi" else "act"
        given = getattr(policy, name)

        def watched(*args):
            DEVICE.reset_counters()
            result = given(*args)
            scoring.append(DEVICE.peak_bytes)
            return result

        setattr(policy, name, watched)
        fit(module, sentences(), [policy], max_steps=4, accelerator=EmulatedAccelerator(), strategy=MegaTrainStrategy())
        assert len(scoring) > 1
        return max(scoring), sum(p.nbytes for p in module.model.model.layers[0].parameters())

    with emulated_device("lazy"):
        shallow, layer = peaks(3)
    with emulated_device("lazy"):
        deep, _ = peaks(6)
    saved = 4 * 8 * 64 * 4  # one input of samples x tokens x hidden in FP32
    assert layer > 100_000
    assert deep - shallow <= 3 * 3 * saved  # a tap's and a join's copies of it are generous; a layer's weights are 6 times this
