"""The two choices of how to print. A module of its own: the command line needs it before anything else."""

from enum import StrEnum


class Output(StrEnum):
    """``-o``: how a result is written."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class Color(StrEnum):
    """``--color``: always beats NO_COLOR, NO_COLOR beats FORCE_COLOR, both beat the terminal."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"
