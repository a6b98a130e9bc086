from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from roundtrip import BITS

from prefixcache.codecs import Codec, Raw, Transform, TurboQuant, as_codec, codec_from_spec

turboquants = st.builds(
    TurboQuant,
    key_bits=st.sampled_from(BITS),
    value_bits=st.sampled_from(BITS),
    levelling=st.booleans(),
    fp16_layers=st.integers(0, 3),
    sink_tokens=st.integers(0, 256),
    layers=st.dictionaries(st.integers(-3, 40), st.one_of(st.none(), st.sampled_from(BITS)), max_size=3),
    seed=st.integers(0, 2**63 - 1),
    raw_latents=st.booleans(),
)
transforms = st.builds(Transform, quality=st.sampled_from([4, 3.5]) | st.floats(1, 6), otherwise=turboquants)
codecs = st.one_of(st.just(Raw()), turboquants, transforms)


@given(codecs)
def test_a_spec_brings_its_codec_back_through_json(codec: Codec) -> None:
    back = codec_from_spec(json.loads(json.dumps(codec.spec())))
    assert back == codec
    assert hash(back) == hash(codec)
    assert str(back) == str(codec)


@given(codecs, codecs)
def test_codecs_that_differ_have_specs_and_names_that_differ(one: Codec, other: Codec) -> None:
    assert (one == other) == (one.spec() == other.spec()) == (str(one) == str(other))


def test_names_are_short() -> None:
    assert str(Raw()) == "raw"
    assert str(TurboQuant(4, 3)) == "turboquant k4 v3"
    assert str(TurboQuant(4, 3, seed=5, raw_latents=False)) == "turboquant k4 v3 seed 5 with latents"
    assert [str(Transform(quality)) for quality in (4, 3.5)] == ["transform quality 4", "transform quality 3.5"]
    assert str(Transform(4, TurboQuant(3, 3))) == "transform quality 4 otherwise turboquant k3 v3"


@pytest.mark.parametrize("otherwise", [Raw(), "turboquant:3", None, Transform()])
def test_a_codec_that_no_file_could_name_is_refused(otherwise: Any) -> None:
    """What was stored with it would be lost to the next process."""
    with pytest.raises(ValueError, match=r"otherwise=.*not a TurboQuant"):
        Transform(4, otherwise)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "codec None: not known"),
        ({"name": ["raw"], "version": 1}, "not known"),
        ({"name": "zip", "version": 1}, "codec 'zip': not known here; known are raw, transform, turboquant"),
        ({"name": "raw"}, "version None"),
        ({"name": "turboquant", "version": 9}, "'turboquant' version 9: this release reads version 2"),
        ({"name": "raw", "version": True}, "version True"),
        ({"name": "raw", "version": 1, "bits": 4}, "check bits"),
        ({"name": "turboquant", "version": 2, "key_bits": 4}, "check fp16_layers"),
        ({**TurboQuant().spec(), "key_bits": 9}, "key_bits=9"),
    ],
)
def test_a_spec_that_cannot_be_read_is_named(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        codec_from_spec(spec)


@pytest.mark.parametrize(
    ("value", "codec"),
    [
        (None, None),
        ("turboquant", TurboQuant()),
        ("turboquant:3", TurboQuant(3, 3)),
        (" TurboQuant:4:3", TurboQuant(4, 3)),
        ("RAW ", Raw()),
        ("turboquant:4:3:plain", TurboQuant(4, 3, levelling=False)),
        ("turboquant:3:fp16_layers=2:sink_tokens=4:seed=1", TurboQuant(3, 3, fp16_layers=2, sink_tokens=4, seed=1)),
        ("raw", Raw()),
        (Raw(), Raw()),
        ({"name": "turboquant", "key_bits": 4, "value_bits": 3}, TurboQuant(4, 3)),
        (TurboQuant(4, 2).spec(), TurboQuant(4, 2)),
        (
            {"name": "transform", "quality": 3, "otherwise": {"name": "turboquant", "key_bits": 3, "value_bits": 2}},
            Transform(3, TurboQuant(3, 2)),
        ),
    ],
)
def test_a_setting_names_a_codec(value: Any, codec: Codec | None) -> None:
    assert as_codec(value) == codec


@pytest.mark.parametrize(
    "value",
    [
        "",
        "zip",
        "raw:4",
        "turboquant:4:3:2",
        "turboquant:x",
        "turboquant:plain:4",
        "raw:plain",
        "turboquant:seed=x",
        "turboquant:seed=1_0",
        "turboquant:4:seed=1:seed=2",
        "turboquant:",
        "turboquant 4",
        "4",
    ],
)
def test_a_text_that_names_no_codec_says_what_to_write(value: str) -> None:
    with pytest.raises(ValueError, match=r'not a codec; write "raw"'):
        as_codec(value)


@pytest.mark.parametrize("value", [4, TurboQuant, b"raw"])
def test_another_type_is_no_codec(value: Any) -> None:
    with pytest.raises(TypeError, match="pass a codec"):
        as_codec(value)


@pytest.mark.parametrize(("value", "named"), [("turboquant:4:5", "value_bits=5"), ("turboquant:16", "key_bits=16")])
def test_a_setting_of_a_bad_depth_names_it_and_says_what_to_choose(value: str, named: str) -> None:
    with pytest.raises(ValueError, match=f"{named}.*choose"):
        as_codec(value)
