"""Names that others chose, in what homenode writes for Kubernetes: each is one name, or refused."""

import shlex

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from homenode.cluster.arguments import ManifestOptions
from homenode.cluster.kubevirt.manifests import render_manifests
from homenode.cluster.kubevirt.object import format_yaml
from homenode.errors import UsageError
from tests.hostile_names import ENCODED, NAMES


@pytest.mark.parametrize("name", ENCODED, ids=ascii)
def test_yaml_is_read_as_it_was_written(name: str) -> None:
    value = {"a": name, "b": [name, {name: name}], "c": f"{name}\n", "d": f"x\n{name}\n"}
    assert yaml.safe_load(format_yaml(value)) == value


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_the_same_in_yaml(text: str) -> None:
    value = {"a": text, "b": [{"c": text}], "d": [text]}
    assert yaml.safe_load(format_yaml(value)) == value


@pytest.mark.parametrize(
    "field",
    ["vm", "namespace", "image", "bench_image", "gpu", "gpu_id", "kubevirt", "guest"],
)
def test_manifests_hold_names_that_are_no_more_than_names(field: str) -> None:
    plain = render_manifests(ManifestOptions(image="r.example/h:1"))
    for name in NAMES:
        try:
            found = render_manifests(ManifestOptions(**{"image": "r.example/h:1", field: name}))  # type: ignore[arg-type]
        except UsageError:
            continue
        assert shlex.quote(name) == name and not name.startswith("-")
        for file, text in found.items():
            if file.endswith("Containerfile"):
                assert text.count("\n") == plain[file].count("\n")
            elif file.endswith(".yaml"):
                documents = list(yaml.load_all(text, yaml.CSafeLoader))
                assert len(documents) == plain[file].count("---\n") + 1
