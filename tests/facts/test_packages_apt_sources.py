"""Both formats of sources.list(5), and disabled entries."""

import pytest

from gpunode.facts.packages import AptSource, read_sources
from gpunode.host import Host

DIRECTORY = "etc/apt/sources.list.d"


@pytest.fixture
def sources(tmp_path):
    (tmp_path / DIRECTORY).mkdir(parents=True)

    def read(**files):
        for name, text in files.items():
            (tmp_path / DIRECTORY / name.replace("_", ".")).write_text(text)
        return read_sources(Host(tmp_path, environ={}))

    return read


def test_lines_with_and_without_options(sources):
    text = (
        "# deb https://old.example.com /\n"
        "deb [arch=amd64 signed-by=/k.gpg] https://a.example.com/deb/ stable main # ours\n"
        "\n"
        "deb-src https://b.example.com /\n"
        "deb https://no-suite.example.com\n"
        "rpm https://c.example.com /\n"
    )
    path = f"/{DIRECTORY}/a.list"
    assert sources(a_list=text) == (
        AptSource(path, 2, "https://a.example.com/deb", "stable", "/k.gpg"),
        AptSource(path, 4, "https://b.example.com", "/", ""),
    )


def test_stanza_with_several_suites_and_a_disabled_one(sources):
    text = (
        "Types: deb\nURIs: https://a.example.com/\nSuites: one two\nSigned-By:\n /k.gpg\n\n"
        "Enabled: no\nTypes: deb\nURIs: https://b.example.com\nSuites: /\n\n"
        "# a comment\nTypes: deb\nURIs: https://c.example.com\nSuites: /\n"
    )
    found = sources(a_sources=text)
    assert [(one.line, one.uri, one.suite, one.signed_by) for one in found] == [
        (1, "https://a.example.com", "one", "/k.gpg"),
        (1, "https://a.example.com", "two", "/k.gpg"),
        (12, "https://c.example.com", "/", ""),
    ]


def test_node_without_apt_has_no_sources(tmp_path):
    assert read_sources(Host(tmp_path, environ={})) == ()
