"""What is common to all model families."""

import functools

import pytest

from hopper_sol.nodes.models.base import ModelAdapter, uses_constant


def publishes(options):
    options["block_index"] = 1


def reads(options):
    return options.get("block_index")


def only_named(block_index):
    """A parameter called block_index publishes nothing."""
    return block_index


class CallableObject:
    def __call__(self, options):
        options["block_index"] = 1


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (publishes, True),
        (reads, True),
        (only_named, False),
        (functools.partial(publishes), False),
        (CallableObject(), False),
        (len, False),
        (None, False),
    ],
)
def test_uses_constant(function, found):
    assert uses_constant(function, "block_index") is found


def test_uses_constant_matches_whole_strings():
    assert not uses_constant(publishes, "block")


def test_adapter_defaults_leave_fp8_to_every_layer(make_adapter):
    assert ModelAdapter.default_fp8_layers(make_adapter()) == "all"
    assert ModelAdapter.default_token_order == "none"
    assert ModelAdapter.default_dense_layers == "none"


def test_adapter_of_no_family_can_not_be_made():
    with pytest.raises(TypeError, match="abstract"):
        ModelAdapter("x", 1, 1, 128, 1, True, None)


@pytest.mark.parametrize(("latent", "frames"), [(1, [1]), (3, [1, 1, 1]), (0, [])])
def test_video_frames_of_a_family_without_a_stride(make_adapter, latent, frames):
    assert make_adapter().video_frames(latent) == frames


def test_video_frames_follow_the_stride(make_adapter, monkeypatch):
    adapter = make_adapter()
    monkeypatch.setattr(type(adapter), "temporal_stride", 4)
    assert adapter.video_frames(3) == [1, 4, 4]
