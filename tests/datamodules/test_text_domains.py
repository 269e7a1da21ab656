import pytest

from lightning_megatrain.datamodules.text_domains import Domain, as_domains


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text")
    return str(path)


def test_mappings_and_domain_objects_are_the_same(file):
    assert as_domains({"a": {"files": file, "proportion": 2}}) == as_domains({"a": Domain(files=file, proportion=2)})


@pytest.mark.parametrize(
    ("domains", "error", "message"),
    [
        ({}, ValueError, "`domains` is empty"),
        (["a"], TypeError, "must map names to domains, got list"),
        ({"": {"files": "FILE"}}, ValueError, "no name for a domain"),
        ({"a/b": {"files": "FILE"}}, ValueError, "'a/b' is no name"),
        ({"a": "FILE"}, TypeError, "Domain 'a' must be a mapping"),
        ({"a": {"file": "FILE"}}, ValueError, "Domain 'a' has the unknown key 'file'. Known keys: files"),
        ({"a": {}}, ValueError, "Domain 'a' needs `files` or `dataset`"),
        ({"a": {"files": "FILE", "dataset": "x"}}, ValueError, "Domain 'a' needs `files` or `dataset`, and only one"),
        ({"a": {"files": "/nowhere/*.txt"}}, FileNotFoundError, r"Domain 'a': no file matches '/nowhere/\*.txt'"),
        ({"a": {"files": []}}, FileNotFoundError, "Domain 'a': `files` is an empty list"),
        ({"a": {"files": "FILE", "proportion": 0}}, ValueError, "Domain 'a' has proportion 0: it must be a positive"),
        ({"a": {"files": "FILE", "proportion": -1.0}}, ValueError, "proportion -1.0"),
        ({"a": {"files": "FILE", "proportion": float("nan")}}, ValueError, "proportion nan"),
        ({"a": {"files": "FILE", "proportion": 1}, "b": {"files": "FILE"}}, ValueError, r"set for \['a'\] but not for \['b'\]"),
        ({"code": {"files": "FILE"}, "Code ": {"files": "FILE"}}, ValueError, "'code' and 'Code ' have the same name"),
    ],
)
def test_a_wrong_domain_is_named_before_anything_is_read(file, domains, error, message):
    def put(value):
        if isinstance(value, dict):
            return {key: put(item) for key, item in value.items()}
        return file if value == "FILE" else value

    with pytest.raises(error, match=message):
        as_domains(put(domains))
