"""The committed protobuf code matches its .proto files: regenerated if possible, read otherwise."""

import importlib
import importlib.util
import re

import pytest

from fixtures.generate_protos import PROTOS, REPOSITORY, generate

MODULES = [name.removesuffix(".proto").replace("/", ".") + "_pb2" for name in PROTOS]
PAIRS = list(zip(PROTOS, MODULES, strict=True))


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="needs grpcio-tools==1.76.0")
@pytest.mark.parametrize("proto", PROTOS)
def test_regenerating_the_protos_changes_nothing(tmp_path, proto):
    for made in generate(REPOSITORY, tmp_path, proto):
        assert made.read_text() == (REPOSITORY / made.relative_to(tmp_path)).read_text()


def fields_of(text: str) -> dict[str, set[tuple[str, int]]]:
    """Message name to (field, number), parsed from a .proto without protobuf."""
    text = re.sub(r"//.*", "", text)
    bodies = re.findall(r"^message (\w+) \{(.*?)\}", text, re.DOTALL | re.MULTILINE)
    pattern = r"(?:repeated |map<[\w, ]+> |\w[\w.]* )?(\w+) = (\d+)"
    return {name: {(f, int(n)) for f, n in re.findall(pattern, body)} for name, body in bodies}


@pytest.mark.parametrize(("proto", "module"), PAIRS)
def test_generated_messages_have_the_protos_fields_and_numbers(proto, module):
    described = importlib.import_module(module).DESCRIPTOR
    generated = {
        name: {(field.name, field.number) for field in message.fields}
        for name, message in described.message_types_by_name.items()
    }
    assert generated == fields_of((REPOSITORY / proto).read_text())


@pytest.mark.parametrize("module", MODULES)
def test_generated_code_runs_with_the_oldest_supported_protobuf(module):
    text = (REPOSITORY / f"{module.replace('.', '/')}.py").read_text()
    assert "# Protobuf Python Version: 6.31.1" in text
    assert 'protobuf>=6.31.1,<8"' in (REPOSITORY / "pyproject.toml").read_text()


def test_no_service_code_is_committed():
    assert not list((REPOSITORY / "gpunode").rglob("*_pb2_grpc.py"))
