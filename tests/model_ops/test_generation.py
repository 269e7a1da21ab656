"""Generation continues each sample as it would alone."""

import pytest
import torch
from torch import Tensor, nn

from lightning_megatrain.model_ops import generate
from tests.model_ops.subjects import Lit, bert, gpt2, llama, t5, text_batch


@pytest.mark.parametrize("build", [llama, gpt2])
def test_a_padded_batch_continues_as_each_sample_alone(build: type[nn.Module]) -> None:
    model, batch = build().eval(), text_batch()
    found = generate(Lit(model), batch, max_new_tokens=5)
    for i, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        prompt = batch["input_ids"][i : i + 1, :length]
        alone = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, pad_token_id=0)  # type: ignore[operator]
        assert found[i][0].tolist() == alone[0, length:].tolist()


def test_left_padding_gives_the_same() -> None:
    model, batch = llama(), text_batch()
    lengths = batch["attention_mask"].sum(1)
    left = {k: torch.stack([row.roll(int(9 - n)) for row, n in zip(v, lengths, strict=True)]) for k, v in batch.items()}
    assert as_lists(generate(model, left, 4)) == as_lists(generate(model, batch, 4))


def test_the_prompt_can_end_where_labels_begin() -> None:
    model, batch = llama(), text_batch()
    batch["labels"][:, :2] = -100
    prompts = {"input_ids": batch["input_ids"][:, :2]}
    assert as_lists(generate(model, batch, 4, prompt="unlabelled")) == as_lists(generate(model, prompts, 4))


def test_draws_follow_the_seed_and_not_the_generators() -> None:
    model, batch = llama(), text_batch()
    first = as_lists(generate(model, batch, 6, num_samples=3, seed=5))
    assert [len(samples) for samples in first] == [3] * 5
    torch.rand(3)
    assert as_lists(generate(model, batch, 6, num_samples=3, seed=5)) == first
    assert as_lists(generate(model, batch, 6, num_samples=3, seed=6)) != first


def test_tokens_end_with_the_end_token() -> None:
    """The model is made to say its end token next."""
    model, batch = gpt2().eval(), text_batch()
    end = model.generation_config.eos_token_id  # type: ignore[union-attr]

    def only_the_end(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return torch.zeros_like(output).index_fill(-1, torch.tensor([end]), 10.0)

    model.lm_head.register_forward_hook(only_the_end)  # type: ignore[union-attr]
    assert as_lists(generate(model, batch, 5)) == [[[end]]] * 5


def test_an_encoder_decoder_answers_without_its_start_token() -> None:
    model, batch = t5().eval(), text_batch()
    expected = model.generate(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=4)[:, 1:]  # type: ignore[operator]
    found = generate(model, batch, 4)
    assert [samples[0].tolist() for samples in found] == [row[: len(f[0])].tolist() for row, f in zip(expected, found, strict=True)]


def test_what_cannot_generate_is_refused() -> None:
    with pytest.raises(TypeError, match=r"no Hugging Face model that can generate.*compute_generations"):
        generate(bert(), text_batch())
    for wrong in ({"num_samples": 0}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            generate(llama(), text_batch(), **wrong)
    with pytest.raises(ValueError, match="neither 'all' nor 'unlabelled'"):
        generate(llama(), text_batch(), prompt="none")
    with pytest.raises(ValueError, match="needs `labels` in the batch"):
        generate(llama(), {"input_ids": torch.ones(2, 3, dtype=torch.long)}, prompt="unlabelled")

    class Echo(nn.Module):
        def compute_generations(self, batch: Tensor, max_new_tokens: int, num_samples: int) -> list[list[Tensor]]:
            return [[row[:max_new_tokens]] * num_samples for row in batch]

    assert as_lists(generate(Echo(), torch.tensor([[1, 2, 3]]), 2)) == [[[1, 2]]]


def as_lists(generated: list[list[Tensor]]) -> list[list[list[int]]]:
    return [[tokens.tolist() for tokens in samples] for samples in generated]
