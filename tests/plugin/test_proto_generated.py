"""The committed protobuf code against the .proto files."""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from fixtures import generate_protos
from gpunode.daemons.proto import podresources_pb2
from gpunode.plugin.kubelet import server
from gpunode.plugin.kubelet.watcher import PLUGIN_REGISTRATION
from gpunode.plugin.proto import deviceplugin_pb2, pluginregistration_pb2
from tests.plugin.kubelet_stub import POD_RESOURCES

CODE = {
    "deviceplugin": (deviceplugin_pb2, (server.REGISTRATION, server.DEVICE_PLUGIN), 20),
    "pluginregistration": (pluginregistration_pb2, (PLUGIN_REGISTRATION,), 4),
    "podresources": (podresources_pb2, (POD_RESOURCES,), 11),
}
TYPES = {"bool": 8, "string": 9, "int32": 5, "int64": 3}
each = pytest.mark.parametrize("name", CODE)


def path_of(name: str) -> str:
    return next(path for path in generate_protos.PROTOS if path.endswith(f"/{name}.proto"))


def text(name: str) -> str:
    return (generate_protos.REPOSITORY / path_of(name)).read_text()


def declared(name: str) -> dict[str, dict[str, tuple[int, str]]]:
    """Message to field to (number, type as written), read from the .proto by hand."""
    found = {}
    for message, body in re.findall(r"^message (\w+) \{(.*?)\}$", text(name), re.DOTALL | re.MULTILINE):
        fields = re.findall(r"^ *((?:repeated )?[\w<>, ]+?) (\w+) = (\d+);", body, re.MULTILINE)
        found[message] = {field: (int(number), kind) for kind, field, number in fields}
    return found


def compiled(code: Any) -> dict[str, dict[str, tuple[int, str]]]:
    """The same from the descriptor of the committed code."""
    scalar = {number: name for name, number in TYPES.items()}
    found = {}
    for name, message in code.DESCRIPTOR.message_types_by_name.items():
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


@each
def test_committed_code_has_the_messages_fields_numbers_and_types_of_the_proto(name: str) -> None:
    code, _, count = CODE[name]
    assert len(declared(name)) == count
    assert compiled(code) == declared(name)


@each
def test_services_are_those_of_the_proto(name: str) -> None:
    code, services, _ = CODE[name]
    methods = re.findall(r"rpc (\w+)\((\w+)\) returns \((stream )?(\w+)\);", text(name))
    assert methods
    found = {
        method.name: (method.input_type.name, method.output_type.name, method.server_streaming)
        for service in code.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert found == {name: (asked, given, bool(stream)) for name, asked, stream, given in methods}
    assert {service.full_name for service in code.DESCRIPTOR.services_by_name.values()} == {
        service.name for service in services
    }
    ours = {
        method: (asked.DESCRIPTOR.name, given.DESCRIPTOR.name, method in server.STREAMS)
        for service in services
        for method, (asked, given) in service.methods.items()
    }
    assert ours == found


@each
@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="grpcio-tools is not installed")
def test_regenerating_changes_nothing(tmp_path: Path, name: str) -> None:
    if version("grpcio-tools") != generate_protos.GENERATOR:
        pytest.skip(f"grpcio-tools is not {generate_protos.GENERATOR}")
    proto = path_of(name)
    assert proto in generate_protos.PROTOS
    for fresh in generate_protos.generate(generate_protos.REPOSITORY, tmp_path, proto):
        committed = generate_protos.REPOSITORY / fresh.relative_to(tmp_path)
        assert fresh.read_text() == committed.read_text()
