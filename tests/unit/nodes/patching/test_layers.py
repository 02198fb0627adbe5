"""Layer texts as people type them."""

import pytest

from hopper_sol.nodes.patching.layers import check_layer_text, describe_layers, parse_layers


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("0", {0}),
        ("10-12", {10, 11, 12}),
        ("0-2,-1", {0, 1, 2, 29}),
        ("-1", {29}),
        ("-30", {0}),
        ("-3--1", {27, 28, 29}),
        ("28--1", {28, 29}),
        ("-2-29", {28, 29}),
        ("5-5", {5}),
        ("3,1,3,0-1", {0, 1, 3}),
        ("  0 - 2 ,\t-1 ", {0, 1, 2, 29}),
        ("ALL", set(range(30))),
        ("all", set(range(30))),
        ("None", set()),
        ("", set()),
        ("   ", set()),
        ("0-29", set(range(30))),
    ],
)
def test_parse_layers_reads(text, layers):
    assert parse_layers("dense_layers", text, 30) == layers
    assert check_layer_text("dense_layers", text) is None


@pytest.mark.parametrize(
    ("text", "item"),
    [
        ("auto", "auto"),
        ("first", "first"),
        ("1..3", "1..3"),
        ("0,", ""),
        (",0", ""),
        ("0,,1", ""),
        ("1-", "1-"),
        ("--1", "--1"),
        ("1-2-3", "1-2-3"),
        ("1.5", "1.5"),
        ("0;1", "0;1"),
        ("+1", "+1"),
        ("all,0", "all"),
        ("1 2", "1 2"),
        ("10 19", "10 19"),
    ],
)
def test_parse_layers_refuses_bad_spelling(text, item):
    """Names the input, what was typed, the part that can't be read, and gives an example."""
    with pytest.raises(ValueError, match="fp8_layers: got") as error:
        parse_layers("fp8_layers", text, 30)
    message = str(error.value)
    assert repr(text) in message and repr(item) in message
    assert "'10-19'" in message
    assert check_layer_text("fp8_layers", text) == message


@pytest.mark.parametrize(("text", "edge"), [("4", 4), ("-5", -5), ("0-4", 4), ("0,1-99", 99)])
def test_parse_layers_out_of_range_names_the_block_count(text, edge):
    with pytest.raises(ValueError, match="dense_layers: got") as error:
        parse_layers("dense_layers", text, 4)
    message = str(error.value)
    assert f"got {edge} in {text!r}" in message
    assert "this model has 4 blocks: use 0 .. 3 or -4 .. -1" in message


@pytest.mark.parametrize("text", ["3-1", "2-1", "-1-0", "0,-1--3"])
def test_parse_layers_backwards_says_so(text):
    with pytest.raises(ValueError, match=r"dense_layers: .*runs backwards .*of 30\)"):
        parse_layers("dense_layers", text, 30)


def test_parse_layers_backwards_depends_on_the_model():
    """20--15 is 20 .. 25 of 40 blocks and nothing at all of 30: only the model can tell."""
    assert check_layer_text("dense_layers", "20--15") is None
    assert parse_layers("dense_layers", "20--15", 40) == set(range(20, 26))
    with pytest.raises(ValueError, match="blocks 20 to 15 of 30"):
        parse_layers("dense_layers", "20--15", 30)


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (set(), "none"),
        ({0}, "0"),
        ({0, 1, 2, 39}, "0-2,39"),
        ({3, 5, 4}, "3-5"),
        ({0, 2, 4}, "0,2,4"),
    ],
)
def test_describe_layers_is_short(layers, text):
    assert describe_layers(frozenset(layers)) == text


def test_describe_layers_round_trip():
    for bits in range(1 << 6):
        layers = frozenset(i for i in range(6) if bits >> i & 1)
        assert parse_layers("x", describe_layers(layers), 6) == layers
