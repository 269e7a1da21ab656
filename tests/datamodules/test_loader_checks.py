"""What a DynamicLoader says of a checkpoint with other domains, and of a batch larger than its data."""

import warnings

import pytest

from lightning_megatrain.datamodules import DynamicLoader

LARGER = "is larger than the data, 50 samples: .* it is full, and a sample comes about 20.0 times in it. Lower `batch_size`"


def loader(*names, shares=True, **more):
    return DynamicLoader({n: range(20) for n in names}, 4, proportions=dict.fromkeys(names, 1.0) if shares else None, **more)


@pytest.mark.parametrize("shares", [True, False])
def test_a_checkpoint_of_other_domains_is_refused_and_both_are_named(shares):
    saved = loader("a", "b", shares=shares).state_dict()
    with pytest.raises(ValueError, match=r"saved with the domains \['a', 'b'\], the data now has \['a', 'c'\]\. Use the dom.*new run"):
        loader("a", "c", shares=shares).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"\['a', 'b'\], the data now has \['a', 'b', 'c'\]\. Use the domains of the checkpoint"):
        loader("a", "b", "c", shares=shares).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"\['a', 'b'\], the data now has \['b', 'a'\], the same in another order\. Name them in"):
        loader("b", "a", shares=shares).load_state_dict(saved)
    loader("a", "b", shares=shares).load_state_dict(saved)


def test_a_run_may_lose_or_get_domains_that_nothing_mixes():
    samples = [{"kind": "x" if i % 2 else "y"} for i in range(12)]
    plain, sorted_out = DynamicLoader(samples, 4), DynamicLoader(samples, 4, domain="kind")
    plain.load_state_dict(sorted_out.state_dict())
    sorted_out.load_state_dict(plain.state_dict())
    sorted_out.set_proportions({"x": 1, "y": 3})
    with pytest.raises(ValueError, match=r"saved with the domains \['x', 'y'\], the data now has \[\]"):
        plain.load_state_dict(sorted_out.state_dict())


def test_a_batch_larger_than_the_data_is_told_where_proportions_make_it_full():
    sources = {"a": range(20), "b": range(30)}
    with pytest.warns(UserWarning, match=f"A batch of 1000 samples .*{LARGER}"):
        assert len(next(iter(DynamicLoader(sources, 1000, proportions={"a": 1, "b": 1})))) == 1000
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plain = DynamicLoader(sources, 1000)
        assert len(next(iter(plain))) == 50, "one pass"
        assert len(next(iter(DynamicLoader(sources, 50, proportions={"a": 1, "b": 1})))) == 50
        assert len(next(iter(DynamicLoader(sources, 1000, proportions={"a": 1, "b": 1}, steps_per_epoch=1)))) == 1000
    with pytest.warns(UserWarning, match=f"A batch of 1000 samples .*{LARGER}"):
        plain.set_proportions({"a": 1, "b": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plain.set_proportions({"a": 1, "b": 2})  # told once
