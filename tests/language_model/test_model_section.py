"""What a command finds of the model in a run's config, to change fields of it."""

import pytest
from transformers import Qwen2Config

from lightning_megatrain.language_model.hugging_face_models import load_config
from lightning_megatrain.language_model.model_section import describe_model

CLASS = "lightning_megatrain.language_model.CausalLM"


def test_a_mapping_is_its_own_description():
    fields = {"model_type": "llama", "hidden_size": 16}
    assert describe_model({"class_path": CLASS, "init_args": {"model": fields}}) is fields


def test_a_folder_is_described_by_its_config(tmp_path):
    config = Qwen2Config(num_hidden_layers=3, hidden_size=64, written_by="somebody")
    config.save_pretrained(tmp_path)
    described = describe_model({"class_path": CLASS, "init_args": {"model": str(tmp_path), "revision": None}})
    assert described["model_type"] == "qwen2"
    assert "written_by" not in described
    again = load_config(described)
    assert (again.num_hidden_layers, again.hidden_size, again.rope_parameters) == (3, 64, config.rope_parameters)


@pytest.mark.parametrize(
    "section",
    [
        {"class_path": "tests.check.subjects.Regression", "init_args": {"model": {"num_layers": 9}}},
        {"class_path": "tests.check.subjects.Regression", "init_args": {"model": "no/such"}},
        {"class_path": CLASS, "init_args": {}},
        {"class_path": CLASS},
        {"model": "no/such"},
    ],
)
def test_of_any_other_module_nothing_is_known(section):
    assert describe_model(section) is None
