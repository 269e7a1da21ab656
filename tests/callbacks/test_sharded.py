"""Policies over a model that is sharded: the same decisions as on one device."""

import numpy as np
import pytest
import torch

from tests.callbacks.modules import tiny_llama
from tests.callbacks.sharded import KINDS, train, train_sharded
from tests.model_ops.ranks import on_ranks


@pytest.mark.long
def test_policies_decide_under_fsdp2_as_on_one_device(tmp_path):
    tiny_llama(seed=5).save_pretrained(tmp_path / "reference")
    first, second = on_ranks(2, train_sharded, tmp_path, str(tmp_path))
    for kind in KINDS:
        one, two = train(kind, tmp_path, sharded=False), first[kind]
        assert two["history"] == second[kind]["history"], kind
        assert [a + b for a, b in zip(two["seen"], second[kind]["seen"], strict=True)] == one["seen"], kind
        assert [step for step, _ in two["history"]] == [step for step, _ in one["history"]] != [], kind
        for (_, a), (_, b) in zip(one["history"], two["history"], strict=True):
            np.testing.assert_allclose([b[k] for k in a], list(a.values()), rtol=1e-4, atol=1e-6, err_msg=kind)
        # means over 4 + 4 samples instead of 8, through eight Adam steps
        torch.testing.assert_close(two["weights"], one["weights"], rtol=1e-3, atol=1e-4, msg=kind)
    assert "LESS failed at step 1: gradient_features needs whole parameters" in first["refusal"]
