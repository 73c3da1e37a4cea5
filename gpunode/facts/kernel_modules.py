"""Configuration of kernel modules before they are loaded: modprobe.d and the kernel's command line.

As kmod(8) reads them (modprobe.d(5), libkmod-config.c): a file hides files of its name in later directories,
all are read in the order of their names, and the command line comes last. Where an option is given more than
once, the last one wins. The active value is the one at the time when the module was loaded:
/sys/module/NAME/parameters shows it for modules that publish their parameters.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from gpunode.errors import ConfigError
from gpunode.host import Host

COMMAND_LINE = "/proc/cmdline"
DIRECTORIES = (
    "/etc/modprobe.d",
    "/run/modprobe.d",
    "/usr/local/lib/modprobe.d",
    "/usr/lib/modprobe.d",
    "/lib/modprobe.d",
)
_KINDS = ("blacklist", "options", "install", "remove", "alias", "softdep")
# commands of an install line that load nothing
_NOTHING = ("/bin/false", "/bin/true", "/usr/bin/false", "/usr/bin/true", ":", "false", "true", "exit")
# words of the command line: kmod's own, the kernel's (admin-guide/kernel-parameters), and dracut's
_BLACKLISTS = ("modprobe.blacklist", "module_blacklist", "rd.driver.blacklist")
_INITRAMFS_ONLY = "rd.driver.blacklist"


class Directive(NamedTuple):
    """One line of modprobe.d, or one equivalent word of the command line.

    `kind` is blacklist, options, install, remove, alias or softdep; `module` has underscores (for an alias it
    is the alias' target); `value` is the rest: ``a=1 b=2``, a command, an alias' pattern, or for a blacklist
    of the command line the word that set it. `line` is None on the command line.
    """

    kind: str
    module: str
    value: str
    source: str
    line: int | None


class ModuleOption(NamedTuple):
    """One parameter of a module at its next load, and its source."""

    name: str
    value: str
    source: str
    line: int | None


class ModuleOptions(NamedTuple):
    """All directives, in order of precedence; `arguments` are the words of the command line."""

    directives: tuple[Directive, ...]
    arguments: tuple[str, ...]

    def of(self, module: str, kind: str) -> tuple[Directive, ...]:
        """A module's directives of one kind; ``-`` and ``_`` are equal in names."""
        name = module.replace("-", "_")
        return tuple(
            directive for directive in self.directives if directive.module == name and directive.kind == kind
        )

    def refused(self, module: str) -> tuple[Directive, ...]:
        """Directives that prevent loading the module for its hardware: blacklist lines and words, an install
        line that loads nothing, ``alias NAME off`` and modeset=0 of a graphics driver. A blacklisted module
        can still be loaded by its name. dracut's word counts only in the initramfs and isn't included
        (`refused_in_initramfs`)."""
        blacklists = (
            directive for directive in self.of(module, "blacklist") if directive.value != _INITRAMFS_ONLY
        )
        installs = (
            directive
            for directive in self.of(module, "install")
            if "".join(directive.value.split(None, 1)[:1]).rstrip(";") in _NOTHING
        )
        off = (
            directive for directive in self.of("off", "alias") if directive.value.replace("-", "_") == module
        )
        unset = self.option(module, "modeset")
        modeset = [
            directive for directive in self.of(module, "options") if "modeset=0" in directive.value.split()
        ]
        return (*blacklists, *installs, *off, *(modeset if unset and unset.value == "0" else ()))

    def refused_in_initramfs(self, module: str) -> tuple[Directive, ...]:
        """Blacklist words of the command line: they count in the initramfs, too, regardless of its
        contents."""
        return tuple(
            directive for directive in self.of(module, "blacklist") if directive.source == COMMAND_LINE
        )

    def options(self, module: str) -> dict[str, ModuleOption]:
        """A module's parameters by name."""
        parameters = {}
        for directive in self.of(module, "options"):
            for word in words(directive.value):
                name, _, value = word.partition("=")
                parameters[name] = ModuleOption(name, value, directive.source, directive.line)
        return parameters

    def option(self, module: str, name: str) -> ModuleOption | None:
        """One parameter of a module, None if nothing sets it."""
        return self.options(module).get(name)

    def argument(self, name: str) -> str | None:
        """The last value of a word of the kernel's command line (``iommu`` of ``iommu=pt``), empty for a word
        without one; None if it is absent."""
        result = None
        for word in self.arguments:
            key, _, value = word.partition("=")
            if key == name:
                result = value
        return result


def read_module_options(host: Host) -> ModuleOptions:
    """`Unreadable` if this user can't read one of the files: its directives would be missing."""
    files: dict[str, str] = {}
    for directory in DIRECTORIES:
        for path in host.glob(directory, "*.conf"):
            files.setdefault(path.rpartition("/")[2], path)
    arguments = kernel_arguments(host.read_text(COMMAND_LINE) or "")
    options: list[Directive] = []
    for name in sorted(files):
        with suppress(ConfigError):  # a directory or a pipe of that name; kmod ignores it too
            options += parse_modprobe(host.read_text(files[name]) or "", files[name])
    return ModuleOptions((*options, *_from_command_line(arguments)), arguments)


def parse_modprobe(text: str, source: str) -> tuple[Directive, ...]:
    """The directives of one file; lines that modprobe.d(5) doesn't define are ignored."""
    result = []
    joined, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        first = first or number
        joined += line
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        parts = joined.split(None, 2)
        if len(parts) > 1 and parts[0] in _KINDS:
            kind, name, value = parts[0], parts[1], " ".join(parts[2:]).strip()
            if kind == "alias":  # alias PATTERN MODULE
                name, value = value or "off", name
            result.append(Directive(kind, name.replace("-", "_"), value, source, first))
        joined, first = "", 0
    return tuple(result)


def kernel_arguments(text: str) -> tuple[str, ...]:
    """The words of a kernel's command line; words after ``--`` are for init."""
    arguments = words(text.strip().strip("\0"))
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def words(text: str) -> tuple[str, ...]:
    """Words separated by blanks; double quotes group words and are removed (lib/cmdline.c)."""
    if '"' not in text:
        return tuple(text.split())
    result, quoted, word = [], False, ""
    for character in text + " ":
        if character == '"':
            quoted = not quoted
        elif character.isspace() and not quoted:
            result.append(word)
            word = ""
        else:
            word += character
    return tuple(entry for entry in (*result, word.rstrip()) if entry)


def _from_command_line(arguments: tuple[str, ...]) -> tuple[Directive, ...]:
    """``module.parameter=value`` and the blacklists."""
    result = []
    for word in arguments:
        key, _, value = word.partition("=")
        if key in _BLACKLISTS:
            names = (name.strip().replace("-", "_") for name in value.split(","))
            result += [Directive("blacklist", name, key, COMMAND_LINE, None) for name in names if name]
        elif "." in key:
            module, _, parameter = key.partition(".")
            option = f"{parameter}={value}" if "=" in word else parameter
            quoted = f'"{option}"' if " " in option else option
            result.append(Directive("options", module.replace("-", "_"), quoted, COMMAND_LINE, None))
    return tuple(result)


# Files of modprobe.d that keep nouveau and nova from GPUs, and the commands that apply them at the next boot.

NOUVEAU_FILE = "/etc/modprobe.d/blacklist-nouveau.conf"
NOUVEAU_TEXT = "blacklist nouveau\noptions nouveau modeset=0\n"
NOVA_FILE = "/etc/modprobe.d/blacklist-nova.conf"
NOVA_TEXT = "blacklist nova_core\nblacklist nova_drm\nblacklist nova\n"
# by distribution family: the initramfs may contain nouveau, and loads it before reading any file of the root
INITRAMFS: dict[str, tuple[tuple[str, ...], ...]] = {
    "debian": (("update-initramfs", "-u", "-k", "all"),),
    "rhel": (
        ("dracut", "-f", "--regenerate-all"),
        ("grubby", "--update-kernel=ALL", "--args=rd.driver.blacklist=nouveau modprobe.blacklist=nouveau"),
    ),
    "suse": (("dracut", "-f", "--regenerate-all"),),
}
