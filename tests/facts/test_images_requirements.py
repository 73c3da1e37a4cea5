"""NVIDIA_REQUIRE_*: expressions of NVIDIA's images, and properties of any parser of the language."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.facts.images import Comparison, numbers, parse, satisfied

IMAGE = (  # nvidia/cuda:12.6.3-base, shortened
    "cuda>=12.6 brand=unknown,driver>=470,driver<471 brand=nvidia,driver>=470,driver<471 "
    "brand=tesla,driver>=535,driver<536 brand=nvidia,driver>=535,driver<536"
)


def judged(text, **facts):
    return satisfied(
        parse(text), {name: (value,) if isinstance(value, str) else value for name, value in facts.items()}
    )


@pytest.mark.parametrize(
    ("facts", "answer"),
    [
        ({"cuda": "12.6"}, True),
        ({"cuda": "13.0", "driver": "580.65.06"}, True),
        ({"cuda": "12.4", "driver": "550.54.14", "brand": "nvidia"}, False),
        ({"cuda": "12.4", "driver": "550.54.14"}, False),  # no brand would help
        ({"cuda": "12.2", "driver": "535.54.03", "brand": "nvidia"}, True),
        ({"cuda": "12.2", "driver": "535.54.03", "brand": "geforce"}, False),
        ({"cuda": "12.2", "driver": "535.54.03", "brand": ("geforce", "geforcertx")}, False),
        ({"cuda": "12.2", "driver": "535.54.03"}, None),
        ({"cuda": "12.2", "driver": "535.54.03", "brand": ("geforce", "nvidia")}, None),
        ({}, None),
    ],
)
def test_image_of_nvidia(facts, answer):
    assert judged(IMAGE, **facts) is answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", True),
        ("   ", True),
        (",", True),
        ("driver=550.54.14", True),
        ("driver=550.54.14.0", True),
        ("driver!=550.54", True),
        ("driver>550.54", True),
        ("driver<551", True),
        ("driver<=550.54", False),
        ("driver>=550.54.15", False),
        ("DRIVER>=550", True),
        ("arch>=9.0,cuda>=12", True),
        ("arch=9", True),
        ("brand!=GeForce", True),
        ("brand=Tesla", True),
    ],
)
def test_conditions(text, answer):
    assert judged(text, driver="550.54.14", cuda="12.4", arch="9.0", brand="tesla") is answer


@pytest.mark.parametrize(
    "text",
    ["cuda", "cuda>=", ">=12", "cuda=>12", "cuda==12", "cuda>=12.x", "brand>tesla", "colour=red", "cuda>=.",
     "cuda>=" + "9" * 5000, "cuda>=12 " * 5000, "cuda>=٣", "cuda>=1=2"],
)  # fmt: skip
def test_expression_that_the_runtime_refuses_is_refused(text):
    with pytest.raises(ValueError, match=r"not a condition|not a version|only be compared|too long"):
        parse(text)


VERSION = st.lists(st.integers(0, 999), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))
COMPARED = st.builds(
    Comparison,
    st.sampled_from(["cuda", "driver", "arch"]),
    st.sampled_from(["=", "!=", "<", "<=", ">", ">="]),
    VERSION,
)
BRANDED = st.builds(Comparison, st.just("brand"), st.sampled_from(["=", "!="]), st.sampled_from(["a", "b"]))
GROUPS = st.lists(st.lists(COMPARED | BRANDED, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple)
FACTS = st.fixed_dictionaries(
    {"cuda": VERSION, "driver": VERSION, "arch": VERSION, "brand": st.sampled_from(["a", "b"])}
)


@given(GROUPS)
def test_printed_conditions_parse_to_themselves(groups):
    assert parse(" ".join(",".join(map(str, group)) for group in groups)) == groups


@given(COMPARED, VERSION)
def test_condition_and_its_opposite_exclude_each_other(condition, version):
    opposite = {"=": "!=", "!=": "=", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}[condition.operator]
    facts = {condition.name: (version,)}
    other = Comparison(condition.name, opposite, condition.value)
    assert satisfied(((condition,),), facts) is not satisfied(((other,),), facts)


@given(GROUPS, FACTS, st.sets(st.sampled_from(["cuda", "driver", "arch", "brand"])))
def test_unknown_property_never_inverts_the_result(groups, facts, unknown):
    properties = {name: (value,) for name, value in facts.items()}
    full = satisfied(groups, properties)
    assert full is not None
    assert satisfied(groups, {name: properties[name] for name in properties if name not in unknown}) in (
        full,
        None,
    )


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused(text):
    """The printed form parses to the same meaning."""
    try:
        found = numbers(text)
    except ValueError:
        found = None
    assert found is None or numbers(".".join(map(str, found)) or "0") == found
    try:
        groups = parse(text)
    except ValueError:
        groups = ()
    assert all(condition.name for group in groups for condition in group)
