"""Which modules are found to be streamed."""

import pytest
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from lightning_megatrain.engine import find_layers
from tests.engine.models import Block, Tower


def test_like_blocks_of_a_list_are_streamed_and_the_rest_is_resident() -> None:
    layers = find_layers(Tower(layers=3))
    assert list(layers.streamed) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(layers.resident) == ["embedding.weight", "head.weight", "head.bias"]


def test_of_nested_candidates_the_outermost_is_streamed() -> None:
    stages = nn.ModuleList([nn.Sequential(Block(4), Block(4)) for _ in range(2)])
    assert list(find_layers(nn.ModuleDict({"stages": stages})).streamed) == ["stages.0", "stages.1"]


def test_blocks_without_parameters_may_lie_between() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.Dropout(), nn.LayerNorm(4))
    assert list(find_layers(model).streamed) == ["0", "2"]


def test_encoder_and_decoder_are_both_streamed() -> None:
    model = nn.Transformer(8, 2, 2, 3, 16)
    assert list(find_layers(model).streamed) == [f"encoder.layers.{i}" for i in range(2)] + [f"decoder.layers.{i}" for i in range(3)]


def test_layers_that_hugging_face_recomputes_are_streamed() -> None:
    config = AutoConfig.for_model("gpt2", n_embd=8, n_layer=3, n_head=2, vocab_size=10)
    model = nn.ModuleDict({"lm": AutoModelForCausalLM.from_config(config)})
    assert list(find_layers(model).streamed) == [f"lm.transformer.h.{i}" for i in range(3)]


def test_a_model_of_two_parts_has_both_parts_streamed() -> None:
    vision = AutoConfig.for_model(
        "vit", hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, image_size=4, patch_size=2
    )
    text = AutoConfig.for_model("llama", hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=10)
    model = nn.ModuleDict({"vision": AutoModel.from_config(vision), "text": AutoModelForCausalLM.from_config(text)})
    names = list(find_layers(model).streamed)
    assert len([name for name in names if name.startswith("vision.")]) == 2
    assert len([name for name in names if name.startswith("text.")]) == 2


def test_named_by_class_or_by_path() -> None:
    model = Tower(layers=3)
    assert list(find_layers(model, ["Block"]).streamed) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(find_layers(model, ["blocks.[01]", "head"]).streamed) == ["blocks.0", "blocks.1", "head"]


def test_parametrized_modules_go_by_the_name_they_had() -> None:
    model = nn.Sequential(*[weight_norm(nn.Linear(4, 4)) for _ in range(3)])
    assert list(find_layers(model).streamed) == ["0", "1", "2"] == list(find_layers(model, ["Linear"]).streamed)


def test_what_is_kept_resident_is_not_streamed() -> None:
    layers = find_layers(Tower(layers=3), resident=["blocks.1"])
    assert list(layers.streamed) == ["blocks.0", "blocks.2"]
    assert "blocks.1.up.weight" in layers.resident


def test_a_parameter_of_two_layers_is_resident_and_one_of_two_places_in_a_layer_is_not() -> None:
    model = Tower(layers=3)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.blocks[2].norm.bias = model.blocks[2].norm.weight
    layers = find_layers(model)
    assert list(layers.streamed) == ["blocks.0", "blocks.1", "blocks.2"]
    assert "blocks.0.up.weight" in layers.resident
    assert "blocks.2.norm.weight" not in layers.resident


def test_a_block_in_two_places_of_a_list_is_one_layer() -> None:
    block = Block(4)
    assert list(find_layers(nn.ModuleList([block, block, Block(4)])).streamed) == ["0", "2"]


def test_nothing_to_stream_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"No layer of Linear can be streamed.*layers=\['MyBlock'\].*strategy='auto'"):
        find_layers(nn.Linear(2, 2))


def test_a_pattern_that_names_nothing_is_refused_with_the_classes_there_are() -> None:
    with pytest.raises(ValueError, match=r"layers='Blok' names no module of Tower.*Block, Embedding"):
        find_layers(Tower(), ["Blok"])
    with pytest.raises(ValueError, match=r"resident='blocks.9' names no module"):
        find_layers(Tower(), resident=["blocks.9"])
