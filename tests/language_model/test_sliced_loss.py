"""Logits that exist slice by slice give the losses and gradients of logits that exist whole."""

import copy
import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_megatrain.callbacks import ReweightingPolicy
from lightning_megatrain.datamodules import DynamicLoader
from lightning_megatrain.datamodules.packing import IGNORED, pad_batch
from lightning_megatrain.language_model import CausalLM
from lightning_megatrain.language_model.sliced_loss import Head, LossSlices, sliced_losses
from tests.emulated import DEVICE, EmulatedAccelerator, emulated_device
from tests.language_model.test_causal_lm import LENGTHS, LLAMA, SGD, fit, loader, make_model, make_rows, make_trainer

EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.5, "output_router_logits": True}
NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
GPT2 = {"model_type": "gpt2", "vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, **NO_DROPOUT}
GROUPED = {**LLAMA, "num_key_value_heads": 2}
FAMILIES = {
    "llama": LLAMA,
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "qwen2": {**GROUPED, "model_type": "qwen2"},
    "qwen3": {**GROUPED, "model_type": "qwen3", "head_dim": 8},
    "mistral": {**GROUPED, "model_type": "mistral"},
    "gemma2": {**LLAMA, "model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 0.5},
    "gemma3": {**LLAMA, "model_type": "gemma3_text", "head_dim": 8, "final_logit_softcapping": 0.5},
    "gpt2": GPT2,
    "gpt_neox": {**LLAMA, "model_type": "gpt_neox"},
    "olmo2": {**LLAMA, "model_type": "olmo2"},
    "cohere": {**LLAMA, "model_type": "cohere", "logit_scale": 3.0},
    "granite": {**LLAMA, "model_type": "granite", "logits_scaling": 0.2},
    "phi3": {**LLAMA, "model_type": "phi3", "pad_token_id": 0},
    "phi": {**LLAMA, "model_type": "phi"},  # its head has a bias
    "mixtral": {**GROUPED, **EXPERTS, "model_type": "mixtral", "num_local_experts": 4},
    "qwen3_moe": {**GROUPED, **EXPERTS, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 16},
}


def batch_of(lengths=(13, 9, 4)):
    """Rows padded to one length; the first half of the second has no label."""
    batch = pad_batch(make_rows(lengths))
    batch["labels"][1, :5] = IGNORED
    return batch


def losses_and_gradients(model, tokens, batch, precision=torch.float32):
    """Token losses and gradients; the sums weight tokens unequally, as policies do."""
    module = make_model(model, loss_slice=tokens)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision is torch.bfloat16):
        losses = module.compute_token_losses(batch)
    (losses * torch.linspace(0.5, 1.5, losses.numel()).view_as(losses)).mean().backward()
    return losses.detach(), {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("tokens", [1, 5, 32])
@pytest.mark.parametrize("family", FAMILIES)
def test_sliced_equals_whole(family, tokens):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing falls back
        losses, gradients = losses_and_gradients(FAMILIES[family], tokens, batch_of())
    expected_losses, expected = losses_and_gradients(FAMILIES[family], None, batch_of())
    torch.testing.assert_close(losses, expected_losses, rtol=0, atol=1e-6)
    assert (expected_losses == 0).any()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-6)  # FP32 sums in another order


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi"])
def test_a_single_slice_equals_the_whole_bit_for_bit(family):
    module, batch = make_model(FAMILIES[family], loss_slice=None), batch_of()
    whole = module.compute_token_losses(batch)
    whole.sum().backward()
    expected = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    head, given = Head.of(module.model), []
    with head.apart(given):
        module._run(batch)
    losses = sliced_losses(head, given[0], batch["labels"], tokens=1000)
    losses.sum().backward()
    assert torch.equal(losses, whole)
    assert [name for name, p in module.named_parameters() if not torch.equal(p.grad, expected[name])] == []


def test_under_autocast_gradients_of_slices_are_summed_in_fp32():
    losses, gradients = losses_and_gradients(LLAMA, 5, batch_of(), torch.bfloat16)
    whole_losses, whole = losses_and_gradients(LLAMA, None, batch_of(), torch.bfloat16)
    _, exact = losses_and_gradients(LLAMA, None, batch_of())
    torch.testing.assert_close(losses, whole_losses, rtol=0, atol=1e-6)
    for name in whole:
        assert gradients[name].dtype is torch.float32
        error, whole_error = ((found[name] - exact[name]).norm() / exact[name].norm() for found in (gradients, whole))
        assert error < 1.2 * whole_error + 1e-6, name  # each rounded to BF16 once or twice; summed in BF16 it would be 2


def test_a_batch_that_fits_a_slice_runs_whole(monkeypatch):
    def never(*_, **__):
        raise AssertionError("sliced")

    monkeypatch.setattr("lightning_megatrain.language_model.sliced_loss.sliced_losses", never)
    batch = batch_of()
    make_model(LLAMA, loss_slice=batch["labels"].numel()).compute_token_losses(batch)
    with pytest.raises(AssertionError, match="sliced"):
        make_model(LLAMA, loss_slice=batch["labels"].numel() - 1).compute_token_losses(batch)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_streamed_equals_plain_bit_for_bit(precision):
    if precision == "bf16-true":  # plain trains BF16 weights there; the masters are FP32 here
        watch, _ = fit(make_rows(LENGTHS), 4, 2, "megatrain", model=make_model(loss_slice=7, **SGD), precision=precision)
        whole, _ = fit(make_rows(LENGTHS), 4, 2, "megatrain", model=make_model(loss_slice=None, **SGD), precision=precision)
        for name, gradient in whole.gradients[0].items():
            torch.testing.assert_close(watch.gradients[0][name], gradient, rtol=0, atol=2e-2 * float(gradient.abs().max()))  # BF16: 2**-7
        return
    plain, streamed = (
        fit(make_rows(LENGTHS), 4, 2, strategy, model=make_model(loss_slice=7, **SGD), precision=precision)[0]
        for strategy in ("auto", "megatrain")
    )
    for one, other in zip(plain.gradients, streamed.gradients, strict=True):
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("arguments", [{}, {"lora": {"r": 2, "target_modules": "all-linear"}}, {"model": FAMILIES["tied"]}])
def test_training_is_that_of_whole_logits(arguments):
    trained = []
    for tokens in (7, None):
        module = make_model(loss_slice=tokens, **SGD, **arguments)
        make_trainer(max_epochs=1, accumulate_grad_batches=2, strategy="megatrain").fit(module, loader(make_rows(LENGTHS), 4))
        trained.append(dict(module.named_parameters()))
    for name, parameter in trained[1].items():
        torch.testing.assert_close(trained[0][name], parameter, rtol=0, atol=1e-6)


def test_validation_and_prediction_use_slices(monkeypatch):
    sizes = []
    plain = nn.functional.cross_entropy
    monkeypatch.setattr("torch.nn.functional.cross_entropy", lambda logits, *a, **k: sizes.append(len(logits)) or plain(logits, *a, **k))
    rows, module = make_rows([9, 9]), make_model(loss_slice=4)
    trainer = make_trainer()
    trainer.validate(module, loader(rows, 2), verbose=False)
    trainer.predict(module, loader(rows, 2))
    assert sizes == [4, 4, 4, 4, 2] * 2


class _Fixed(ReweightingPolicy):
    def weigh(self, losses, batch):
        return torch.linspace(0.1, 2, 8)[self.loader.last.index]


class _Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        (row,) = make_rows([12], seed=index)
        row["labels"][: index + 1] = IGNORED
        return row


def test_policies_weigh_the_sliced_loss():
    seen = []

    class Watch(L.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            seen.append([p.grad.clone() for p in module.parameters()])

    for tokens in (5, None):
        module = make_model(loss_slice=tokens, **SGD)
        make_trainer(max_steps=1, accumulate_grad_batches=2, callbacks=[_Fixed(), Watch()]).fit(
            module, DynamicLoader(_Rows(), 4, shuffle=False)
        )
    module = make_model()
    batch = torch.utils.data.default_collate([_Rows()[index] for index in range(8)])
    weight = torch.linspace(0.1, 2, 8)[:, None]
    loss = (weight * module.compute_token_losses(batch)).sum() / (weight * (batch["labels"][:, 1:] != IGNORED)).sum()
    for sliced, whole, wanted in zip(*seen, torch.autograd.grad(loss, list(module.parameters())), strict=True):
        torch.testing.assert_close(sliced, whole, rtol=0, atol=1e-6)
        torch.testing.assert_close(sliced, wanted, rtol=1e-4, atol=1e-6)  # FP32 sums in another order, through two layers


class _TwiceAsLoud(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("break_model", "reason"),
    [
        (lambda model: setattr(model, "lm_head", _TwiceAsLoud(32, 300)), "its output embedding is a _TwiceAsLoud and no nn.Linear"),
        (lambda model: model.register_forward_hook(_double_logits), "it does more between hidden states and logits"),
        (lambda model: setattr(model.config, "final_logit_softcapping", 30.0), "it does more between hidden states and logits"),
        (lambda model: _call_head_twice(model), "it does not call its output embedding once"),
    ],
    ids=["class", "after", "cap", "calls"],
)
def test_what_cannot_be_sliced_runs_whole_and_is_named(break_model, reason):
    module, batch = make_model(loss_slice=5), batch_of()
    break_model(module.model)
    with pytest.warns(UserWarning, match=f"LlamaForCausalLM makes logits of all 39 tokens at once, in spite of loss_slice=5: .*{reason}"):
        losses = module.compute_token_losses(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # said once
        assert torch.equal(module.compute_token_losses(batch), losses)
    module._loss_slices = LossSlices(None)
    assert torch.equal(module.compute_token_losses(batch), losses)


def _double_logits(_, args, output):
    output.logits = output.logits * 2
    return output


def _call_head_twice(model):
    head = model.lm_head
    plain = model.forward

    def twice(*args, **kwargs):
        head(torch.zeros(1, 3, 32))
        return plain(*args, **kwargs)

    model.forward = twice


def test_under_a_strategy_that_shards_weights_logits_are_whole():
    module, batch = make_model(loss_slice=5), batch_of()
    sharded = FSDPStrategy.__new__(FSDPStrategy)
    with pytest.warns(UserWarning, match="under FSDPStrategy the head's weight is there in its own forward only"):
        outputs, _ = LossSlices(5).run(module.model, lambda: module._run(batch), batch["labels"], sharded)
    assert outputs.logits.shape == (*batch["labels"].shape, 300)


def test_a_double_backward_is_refused():
    losses = make_model(loss_slice=5).compute_token_losses(batch_of())
    with pytest.raises(RuntimeError, match="Set loss_slice=None"):
        losses.sum().backward(create_graph=True)


def test_a_slice_without_a_token_is_refused():
    with pytest.raises(ValueError, match="`loss_slice` is 0: it must be at least 1 token"):
        CausalLM(LLAMA, loss_slice=0)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_on_a_device_the_largest_tensor_is_slice_times_vocabulary(precision, monkeypatch):
    sizes = []
    allocated = DEVICE.memory.allocated
    monkeypatch.setattr(DEVICE.memory, "allocated", lambda nbytes: sizes.append(nbytes) or allocated(nbytes))
    model = {**LLAMA, "vocab_size": 2000, "hidden_size": 16, "intermediate_size": 16}  # the head's weight is smaller than a slice's logits
    results = []
    for tokens in (24, None):
        module = make_model(model, loss_slice=tokens, **SGD)
        sizes.clear()
        with emulated_device():
            make_trainer(accelerator=EmulatedAccelerator(), strategy="megatrain", max_steps=2, precision=precision).fit(
                module, loader(make_rows([33, 17, 20, 28]), 2)
            )
        assert max(sizes) == (
            24 * 2000 * 4 if tokens else pytest.approx(2 * 33 * 2000 * 4, rel=0.05)
        )  # whole: with or without the last token
        results.append(copy.deepcopy(dict(module.named_parameters())))
    tolerance = 1e-6 if precision == "32-true" else 1e-4  # learning rate 0.1 x a gradient's BF16 rounding
    for name, parameter in results[0].items():
        torch.testing.assert_close(parameter, results[1][name], rtol=0, atol=tolerance)


def test_the_head_runs_once_more():
    def flops(tokens):
        module, batch = make_model(loss_slice=tokens), batch_of()
        module.compute_token_losses(batch)  # checked
        with FlopCounterMode(display=False) as counter:
            module.compute_token_losses(batch).sum().backward()
        return counter.get_total_flops()

    head = 2 * 32 * 300  # of one token
    assert flops(5) == flops(None) + head * (39 + 3 * 2)  # and the model's own head sees two tokens of each row


@pytest.mark.parametrize("wanted", ["hidden", "weight", "both", "alone"])
def test_backward_makes_no_gradient_that_is_not_asked_for(wanted):
    """One matrix product for the logits again, and one for each gradient."""
    tokens, width, vocabulary = 30, 8, 50
    head = Head(nn.Linear(width, vocabulary, bias=False))
    weight, hidden = head.linear.weight, torch.randn(2, tokens // 2, width, requires_grad=True)
    labels = torch.randint(vocabulary, (2, tokens // 2))
    sliced_losses(head, hidden, labels, 7).sum().backward()
    whole = {"hidden": hidden.grad, "weight": weight.grad}
    hidden.grad = weight.grad = None
    loss = sliced_losses(head, hidden, labels, 7).sum()
    with FlopCounterMode(display=False) as counter:
        if wanted == "alone":
            (weight.grad,) = torch.autograd.grad(loss, [weight])
        else:
            loss.backward(inputs=[t for name, t in (("hidden", hidden), ("weight", weight)) if wanted in (name, "both")])
    assert counter.get_total_flops() == {"hidden": 2, "weight": 2, "both": 3, "alone": 2}[wanted] * 2 * tokens * width * vocabulary
    for name, found in (("hidden", hidden.grad), ("weight", weight.grad)):
        is_wanted = wanted in (name, "both") or (wanted == "alone" and name == "weight")
        assert torch.equal(found, whole[name]) if is_wanted else found is None
