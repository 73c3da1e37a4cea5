"""The committed protobuf code against deviceplugin.proto."""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from fixtures import generate_protos
from gpunode.plugin import rpc
from gpunode.plugin.proto import deviceplugin_pb2 as pb

PROTO = "gpunode/plugin/proto/deviceplugin.proto"
TEXT = (generate_protos.REPOSITORY / PROTO).read_text()
TYPES = {"bool": 8, "string": 9, "int32": 5, "int64": 3}


def declared() -> dict[str, dict[str, tuple[int, str]]]:
    """Message to field to (number, type as written), read from the .proto by hand."""
    found = {}
    for name, body in re.findall(r"^message (\w+) \{(.*?)\}$", TEXT, re.DOTALL | re.MULTILINE):
        fields = re.findall(r"^ *((?:repeated )?[\w<>, ]+?) (\w+) = (\d+);", body, re.MULTILINE)
        found[name] = {field: (int(number), kind) for kind, field, number in fields}
    return found


def compiled() -> dict[str, dict[str, tuple[int, str]]]:
    """The same from the descriptor of the committed code."""
    scalar = {number: name for name, number in TYPES.items()}
    found = {}
    for name, message in pb.DESCRIPTOR.message_types_by_name.items():
        fields = {}
        for field in message.fields:
            inner = field.message_type
            if inner is not None and inner.GetOptions().map_entry:
                kind = "map<string, string>"
            else:
                kind = inner.name if inner is not None else scalar[field.type]
                kind = f"repeated {kind}" if field.is_repeated else kind
            fields[field.name] = (field.number, kind)
        found[name] = fields
    return found


def test_the_committed_code_has_the_messages_fields_numbers_and_types_of_the_proto() -> None:
    assert len(declared()) == 20
    assert compiled() == declared()


def test_the_services_are_those_of_the_proto() -> None:
    methods = re.findall(r"rpc (\w+)\((\w+)\) returns \((stream )?(\w+)\);", TEXT)
    assert len(methods) == 6
    found = {
        method.name: (method.input_type.name, method.output_type.name, method.server_streaming)
        for service in pb.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert found == {name: (asked, given, bool(stream)) for name, asked, stream, given in methods}
    ours = {
        name: (asked.DESCRIPTOR.name, given.DESCRIPTOR.name, name in rpc._STREAMS)
        for service in (rpc.REGISTRATION, rpc.DEVICE_PLUGIN)
        for name, (asked, given) in rpc._METHODS[service].items()
    }
    assert ours == found


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="grpcio-tools is not installed")
def test_generating_again_changes_nothing(tmp_path: Path) -> None:
    if version("grpcio-tools") != generate_protos.GENERATOR:
        pytest.skip(f"grpcio-tools is not {generate_protos.GENERATOR}")
    for fresh in generate_protos.generate(generate_protos.REPOSITORY, tmp_path, PROTO):
        committed = generate_protos.REPOSITORY / fresh.relative_to(tmp_path)
        assert fresh.read_text() == committed.read_text()
