"""The two choices of how to print. A module of its own: the command line needs it before anything else."""

from enum import StrEnum


class Output(StrEnum):
    """``-o``: how a result is written. Only some commands have a page and metrics (`Result.documents`)."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    HTML = "html"
    PROMETHEUS = "prometheus"


class PlainOutput(StrEnum):
    """``-o`` of a command whose result is neither a page nor metrics."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


ENVELOPES = (Output.JSON, Output.YAML)
"""The forms that every command has for programs."""


def output_for(path: str) -> Output | None:
    """The form that a file's name asks for, None if it asks for none."""
    ends = {".json": Output.JSON, ".yaml": Output.YAML, ".yml": Output.YAML, ".html": Output.HTML}
    ends |= {".htm": Output.HTML, ".prom": Output.PROMETHEUS, ".txt": Output.TABLE}
    return next((form for end, form in ends.items() if path.endswith(end)), None)


class Color(StrEnum):
    """``--color``: always beats NO_COLOR, NO_COLOR beats FORCE_COLOR, both beat the terminal."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"
