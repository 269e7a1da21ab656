import logging
import math
import sys

import lightning as L
import pytest
import torch
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_megatrain.datamodules.packing import IGNORED, pad_batch
from lightning_megatrain.datamodules.tokenizers import load_tokenizer
from lightning_megatrain.language_model import CausalLM
from tests.trainers import quiet_trainer

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
# Plain SGD shows the gradient itself in the weights.
SGD = {"optimizer": "torch.optim.SGD", "weight_decay": 0.0, "schedule": "constant", "learning_rate": 0.1}


def make_rows(lengths, seed=0):
    """Rows of unequal length, each one document."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(3, 300, (length,), generator=generator)
        rows.append({"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)})
        rows[-1]["labels"][0] = IGNORED
    return rows


def loader(rows, batch_size):
    return DataLoader(rows, batch_size=batch_size, collate_fn=pad_batch)


def make_trainer(**arguments):
    return quiet_trainer(**{"accelerator": "cpu", **arguments})


def make_model(model=LLAMA, seed=0, **arguments):
    torch.manual_seed(seed)
    module = CausalLM(model, **arguments)
    module.configure_model()
    return module


class Watch(L.Callback):
    """Keeps what other callbacks can see of each step."""

    def __init__(self):
        self.gradients, self.clipped, self.logged = [], [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients.append({name: p.grad.clone() for name, p in pl_module.named_parameters()})

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.clipped.append([p.grad.norm() for p in pl_module.parameters() if p.grad is not None])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def fit(rows, batch_size, accumulate, strategy="auto", clip=None, model=None, precision="32-true"):
    watch = Watch()
    module = model or make_model(**SGD)
    trainer = make_trainer(
        max_epochs=1, accumulate_grad_batches=accumulate, callbacks=[watch], strategy=strategy, gradient_clip_val=clip, precision=precision
    )
    trainer.fit(module, loader(rows, batch_size))
    return watch, module


# 12 rows: the last window has 4 of 8.
LENGTHS = [3, 30, 7, 2, 19, 24, 5, 11, 28, 4, 9, 16]


@pytest.mark.parametrize("strategy", ["auto", "megatrain"])
@pytest.mark.parametrize(("batch_size", "accumulate"), [(4, 2), (2, 4), (1, 8)])
def test_the_gradient_does_not_depend_on_how_a_window_of_unequal_rows_is_cut(batch_size, accumulate, strategy):
    rows = make_rows(LENGTHS)
    whole, trained = fit(rows, 8, 1, strategy)
    cut, also_trained = fit(rows, batch_size, accumulate, strategy)
    assert len(whole.gradients) == len(cut.gradients) == 2, "a full window and a partial one"
    for one, other in zip(whole.gradients, cut.gradients, strict=True):
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-6)  # FP32 sums in another order
    for one, other in zip(trained.parameters(), also_trained.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_the_gradient_is_that_of_the_mean_over_all_label_tokens():
    rows = make_rows(LENGTHS[:8])
    watch, _ = fit(rows, 2, 4)
    module = make_model(**SGD)
    losses = torch.cat([module.compute_token_losses(pad_batch([row])).flatten() for row in rows])
    losses.mean().backward()  # rows alone have no padding, so every entry is a label token
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(watch.gradients[0][name], parameter.grad, rtol=0, atol=1e-6)


def test_clipping_sees_the_weighted_gradient():
    rows = make_rows(LENGTHS[:8])
    norms = []
    for batch_size, accumulate in ((8, 1), (1, 8)):
        _, module = fit(rows, batch_size, accumulate, clip=0.05)
        start = make_model(**SGD)
        moved = [(new - old).norm() for new, old in zip(module.parameters(), start.parameters(), strict=True)]
        norms.append(torch.stack(moved).norm().item())
    assert norms == pytest.approx([0.1 * 0.05] * 2, rel=1e-3)  # learning rate x clip; 1e-3: a difference of weights of size 0.02 in FP32


def test_the_loss_logged_is_that_of_the_window():
    rows = make_rows(LENGTHS[:8])
    whole, _ = fit(rows, 8, 1)
    cut, _ = fit(rows, 1, 8)
    assert cut.logged[-1]["train_loss"] == pytest.approx(whole.logged[-1]["train_loss"], abs=1e-6)
    assert cut.logged[-1]["train_perplexity"] == pytest.approx(math.exp(cut.logged[-1]["train_loss"]))


def test_tokens_per_second_leave_out_padding_and_tell_the_trained_apart():
    _, module = fit(make_rows([4, 10]), 2, 1)
    real, trained = (module.trainer.callback_metrics[name].item() for name in ("tokens_per_second", "trained_tokens_per_second"))
    assert trained / real == pytest.approx(12 / 14)


def test_equal_micro_batches_are_not_rescaled():
    window = CausalLM(LLAMA).window
    for _ in range(4):
        window.add(1.0, 7.0)
    assert window.factor(4) == 1.0


def test_labels_that_are_all_ignored_are_refused():
    rows = make_rows([5, 5])
    for row in rows:
        row["labels"][:] = IGNORED
    with pytest.raises(ValueError, match="No token to train on in step 0: every label of its 2 micro-batches is -100"):
        fit(rows, 1, 2)


def test_a_micro_batch_without_labels_changes_nothing_in_its_window():
    rows = make_rows([5, 9, 4])
    rows[0]["labels"][:] = IGNORED
    with_empty, _ = fit(rows, 1, 3)
    without, _ = fit(rows[1:], 2, 1)
    for name, gradient in without.gradients[0].items():
        torch.testing.assert_close(with_empty.gradients[0][name], gradient, rtol=0, atol=1e-6)


def test_validation_weighs_tokens_over_the_whole_epoch_and_each_domain():
    rows = make_rows(LENGTHS)
    module = make_model()
    losses = [module.compute_token_losses(pad_batch([row])).detach().flatten() for row in rows]

    class Data(L.LightningDataModule):
        domain_names = ("short", "long")

        def val_dataloader(self):
            return [loader(rows[:5], 2), loader(rows[5:], 3)]

        test_dataloader = val_dataloader

    trainer = make_trainer()
    (logged, *_) = trainer.validate(module, datamodule=Data(), verbose=False)
    expected = {"val_loss/short": losses[:5], "val_loss/long": losses[5:], "val_loss": losses}
    for name, parts in expected.items():
        mean = torch.cat(parts).mean().item()
        assert trainer.callback_metrics[name].item() == pytest.approx(mean, abs=1e-6)
        assert trainer.callback_metrics[name.replace("loss", "perplexity")].item() == pytest.approx(math.exp(mean), rel=1e-5)
    trainer.test(module, datamodule=Data(), verbose=False)
    assert trainer.callback_metrics["test_loss/long"].item() == pytest.approx(torch.cat(losses[5:]).mean().item(), abs=1e-6)


def test_prediction_scores_each_row():
    rows = make_rows([4, 9])
    module = make_model().eval()
    (scores,) = make_trainer().predict(module, loader(rows, 2))
    assert scores["tokens"].tolist() == [3, 8]
    for row, loss in zip(rows, scores["loss"], strict=True):
        assert loss.item() == pytest.approx(module.compute_token_losses(pad_batch([row])).sum().item(), rel=1e-5)


def test_the_loss_is_the_one_transformers_computes():
    experts = {"num_key_value_heads": 4, "num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    module = make_model({**LLAMA, "model_type": "mixtral", **experts})
    batch = pad_batch(make_rows([12, 12]))
    theirs = module.model(**batch, use_cache=False).loss
    rows = [{key: value[i] for key, value in batch.items()} for i in range(2)]

    class Keep(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.loss = outputs["loss"]

    keep = Keep()
    make_trainer(max_steps=1, callbacks=[keep]).fit(module, loader(rows, 2))
    assert keep.loss.item() == pytest.approx(theirs.item(), rel=1e-6)


@pytest.mark.parametrize("strategy", ["auto", "megatrain"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_names_step_and_batch_and_changes_no_weight(value, strategy):
    class Broken(CausalLM):
        def _run(self, batch):
            outputs = super()._run(batch)
            if self.trainer.global_step == 1:
                outputs.logits = outputs.logits * value
            return outputs

    torch.manual_seed(0)
    module = Broken(LLAMA)
    after_first_step = {}

    class Keep(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            after_first_step.update({name: tensor.clone() for name, tensor in pl_module.state_dict().items()})

    with pytest.raises(
        FloatingPointError, match=r"The loss is (nan|inf) at step 1 \(epoch 0, batch 1, learning rate 0\.000165\). No weight"
    ):
        make_trainer(max_steps=3, callbacks=[Keep()], strategy=strategy).fit(module, loader(make_rows([5, 6, 7]), 1))
    assert after_first_step
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, after_first_step[name])


def test_weights_decay_but_norms_and_biases_do_not():
    module = make_model({**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2}, weight_decay=0.3)
    make_trainer(max_steps=1).fit(module, loader(make_rows([5]), 1))
    decayed, plain = module.optimizers().param_groups
    names = {parameter: name for name, parameter in module.named_parameters()}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert all("norm" in names[p] or "bias" in names[p] for p in plain["params"])
    assert not any("norm" in names[p] or "bias" in names[p] for p in decayed["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(names)


@pytest.mark.parametrize("limit", [{"max_steps": 10}, {"max_epochs": 2, "limit_train_batches": 5}], ids=["steps", "epochs"])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_rate_rises_to_its_peak_and_falls_to_its_last_value(schedule, limit):
    rates = []

    class Keep(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            rates.append(optimizer.param_groups[0]["lr"])

    module = CausalLM(LLAMA, schedule=schedule, learning_rate=1e-3, warmup_steps=4, min_lr_ratio=0.2)
    make_trainer(callbacks=[Keep()], **limit).fit(module, loader(make_rows([4] * 10), 1))
    assert rates[:4] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3])
    done = [min(1, (step - 4) / 5) for step in range(4, 10)]
    shares = {"constant": [1] * 6, "linear": [1 - d for d in done], "cosine": [(1 + math.cos(math.pi * d)) / 2 for d in done]}[schedule]
    assert rates[4:] == pytest.approx([1e-3 * (share if schedule == "constant" else 0.2 + 0.8 * share) for share in shares])


def test_a_schedule_needs_an_end():
    with pytest.raises(MisconfigurationException, match="schedule='cosine' ends with the training, which has no end: set `max_steps`"):
        make_trainer(max_epochs=-1).fit(CausalLM(LLAMA), loader(make_rows([4]), 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": {"hidden_size": 3}}, "model_type=None, which transformers does not know"),
        ({"model": {"model_type": "lama"}}, "model_type='lama'"),
        ({"model": {**LLAMA, "hiden_size": 3}}, "unknown key 'hiden_size': LlamaConfig has no such field"),
        ({"model": "no/such-model"}, "No model config could be loaded from 'no/such-model'"),
        ({"model": LLAMA, "schedule": "sine"}, "`schedule` is 'sine'"),
        ({"model": LLAMA, "learning_rate": 0.0}, "learning_rate=0.0"),
        ({"model": LLAMA, "optimizer": "torch.optim.Adan"}, "`optimizer` is 'torch.optim.Adan'"),
    ],
)
def test_a_wrong_setting_is_refused_before_weights_are_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        CausalLM(**arguments)


def test_lora_trains_adapters_only_and_says_what_to_install(monkeypatch):
    module = make_model(lora={"r": 2, "target_modules": "all-linear"}, learning_rate=1e-2)
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    make_trainer(max_steps=2, strategy="megatrain").fit(module, loader(make_rows([9, 5]), 1))
    for name, parameter in module.named_parameters():
        assert ("lora_" in name) == parameter.requires_grad
        assert ("lora_" in name) != torch.equal(parameter, before[name]), name
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-megatrain\[lora\]'"):
        CausalLM(LLAMA, lora={"r": 2})


def test_a_folder_gives_config_and_weights(tmp_path):
    torch.manual_seed(3)
    saved = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)).to(torch.bfloat16)
    saved.save_pretrained(tmp_path / "model")
    module = CausalLM(str(tmp_path / "model"))
    assert module.config.hidden_size == 32
    assert module.model is None, "no weight before configure_model"
    module.configure_model()
    for name, tensor in module.model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, saved.state_dict()[name].float())


def test_a_model_that_ignores_positions_refuses_packed_rows():
    opt = {**LLAMA, "model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32}
    opt.pop("intermediate_size")
    ids = torch.arange(3, 15)
    row = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(6).repeat(2)}
    with pytest.raises(MisconfigurationException, match=r"OPTForCausalLM \(opt\) does not keep packed documents apart.*packing='padded'"):
        make_trainer(max_steps=1).fit(CausalLM(opt), loader([row], 1))


def test_a_subclass_trains_with_what_it_passes_on_and_not_with_its_own_arguments_of_that_name():
    class PerThousand(CausalLM):
        def __init__(self, model, learning_rate=5.0):
            super().__init__(model, learning_rate=learning_rate / 1000, schedule="constant")

    module = PerThousand(LLAMA)
    assert module.hparams["learning_rate"] == 5.0
    make_trainer(max_steps=1).fit(module, loader([{"input_ids": torch.arange(3, 15), "labels": torch.arange(3, 15)}], 1))
    assert module.optimizers().param_groups[0]["lr"] == 0.005


def test_the_rate_finder_sets_the_rate():
    module = CausalLM(LLAMA, schedule="constant")
    rows = [{"input_ids": torch.arange(3, 15), "labels": torch.arange(3, 15)}] * 40
    trainer = make_trainer(max_steps=40)
    found = Tuner(trainer).lr_find(module, loader(rows, 1), num_training=30, early_stop_threshold=None).suggestion()
    assert found not in (None, 3e-4)
    trainer.fit(module, loader(rows, 1))
    assert trainer.optimizers[0].param_groups[0]["lr"] == module.hparams["learning_rate"] == found


def test_weights_that_are_not_finite_are_named_and_not_the_packing():
    ids = torch.arange(3, 15)
    row = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(6).repeat(2)}
    module = CausalLM(LLAMA)
    module.configure_model()
    torch.nn.init.constant_(module.model.lm_head.weight, float("nan"))
    with pytest.raises(MisconfigurationException, match=r"LlamaForCausalLM \(llama\) makes logits that are not finite"):
        make_trainer(max_steps=1).fit(module, loader([row], 1))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_packed_documents_pass_the_check_in_every_precision(precision):
    ids = torch.arange(3, 15)
    row = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(6).repeat(2)}
    make_trainer(max_steps=1, precision=precision).fit(CausalLM(LLAMA), loader([row], 1))


def test_generation_continues_the_prompt_and_leaves_no_trace():
    module, tokenizer = make_model().train(), load_tokenizer("bytes")
    state = torch.get_rng_state()
    text = module.generate("abc", tokenizer, max_new_tokens=5)
    assert text.startswith("abc")
    assert text == module.generate("abc", tokenizer, max_new_tokens=5)
    assert torch.equal(state, torch.get_rng_state())
    assert all(part.training for part in module.modules())
    assert isinstance(module.generate("", tokenizer, max_new_tokens=2), str)


def test_a_checkpoint_loads_without_arguments(tmp_path):
    module = make_model()
    trainer = make_trainer(max_steps=1)
    trainer.fit(module, loader(make_rows([5]), 1))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = CausalLM.load_from_checkpoint(tmp_path / "a.ckpt")
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])


def test_nothing_is_logged_as_an_error_in_an_ordinary_run(caplog):
    with caplog.at_level(logging.WARNING):
        fit(make_rows([5, 7]), 1, 1)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("strategy", ["auto", "megatrain"])
def test_a_text_can_be_sampled_while_and_after_training(strategy):
    texts = []

    class Sample(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            texts.append(pl_module.generate("ab", load_tokenizer("bytes"), max_new_tokens=4))

    module = make_model(**SGD)
    make_trainer(max_steps=2, callbacks=[Sample()], strategy=strategy).fit(module, loader(make_rows([5, 6]), 1))
    texts.append(module.generate("ab", load_tokenizer("bytes"), max_new_tokens=4))
    assert texts[1] == texts[2], "the same weights, the same seed"
