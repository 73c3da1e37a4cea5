"""Removal of private data: secrets always, host names and UUIDs on request.

Of arguments and environments only what is known to be harmless is kept: flags and variables of programs that
a diagnosis needs, and values that can't be a secret, such as paths, numbers and addresses. Text has no such
structure, so secrets in it are found by the name before them, by their section, or by their own form. A
secret is replaced by one fixed word. A name or a UUID is replaced by another one, the same each time, so that
related entries still match.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from uuid import UUID

HIDDEN = "REDACTED"
# texts of which a rule needs one (lower case; none: always tried), its pattern and flags, its replacement
_Rule = tuple[tuple[str, ...], str, re.RegexFlag, Any]
_AFTER_COMMANDS = 2  # of the patterns for lines, the first two are for command lines and environments
KINDS = ("hostnames", "uuids")
_WORDS = (
    r"passw|passphrase|passcode|secret|token|credential|authorization|cookie|connection[_-]?string|keytab"
)
_NAMED_KEY = (
    r"(?:api|access|private|client|signing|encryption|licen[cs]e|account|shared|storage|master|auth|app"
    r"|service|subscription|instrumentation|ssh|pre[_-]?shared|hmac|activation|product|backup|session|user"
    r"|admin|ingest|write|read|deploy|registration|enrol?lment|registry|webhook|db|root)[_-]?key|key[_-]data"
)
_KEYS = rf"[\w.\-]{{0,60}}(?:{_WORDS}|{_NAMED_KEY})[\w.\-]{{0,60}}"
_SHORT = r"auth|pwd|pass|pw|creds?|psk|otp|totp|dsn|sas|jwt"
_CAMEL = r"[\w.\-]{0,60}[a-z](?-i:Pwd?|Pass|Psk|Otp|Key)"
_BARE_KEY = r"auths?|(?:db|root|bind|user|admin|ftp|my)(?:pwd?|pass)|pwd?|creds?|psk|t?otp|jwt|dsn|sas"
_KEY = rf"(?:{_KEYS}|[\w.\-]{{0,60}}[_.\-](?:{_SHORT}|key)|{_CAMEL}|{_BARE_KEY})"
_SECTION = r"(?:http[_-]?)?headers?|auths?|credentials?|(?:basic|proxy)[_-]?auth|log-opts"
# a line without any of these contains no secret; most lines are skipped because of it
_HINT = (
    r"pass|secret|token|credential|creds?|auth|key|pwd|[_.\-]?pw|psk|otp|dsn|sas|jwt|cookie|://|bearer|basic"
    r"|sig|x-|connection|identified|-[uUpaw]|exec|command|cmd|environ|license|(?:args|opts|options|flags)="
)
# a key that only says where a secret is stored, or how it is used, isn't a secret
_HARMLESS_KEY = (
    r"(?:file|path|dir|directory|url|mode|ttl|timeout|plugin|webhook|enabled|name|id|days|type|count|max|min"
    r"|policy|provider|endpoint|interval|period|version|format|strategy)s?$"
    r"|^(?:sig|topology|public|gpg|label)[_-]?key$"
)
_HARMLESS = {"true", "false", "null", "none", "", '""', "''", "yes", "no", "on", "off", HIDDEN.lower()}
_KNOWN = (
    r"nvapi-[\w-]{20,}",  # NVIDIA NGC
    r"gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}",
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    r"\bhf_[A-Za-z0-9]{20,}",
    r"\bxox[abprs]-[\w-]{10,}",
    r"\bdckr_pat_[\w-]{16,}",
    r"\bsk-[\w-]{20,}",
    r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?",  # JSON web tokens: licence tokens, service accounts
    r"\bK10[0-9a-f]{32,}::[\w:.-]+",  # k3s and rke2
    r"\b[a-z0-9]{6}\.[a-z0-9]{16}\b",  # kubeadm's bootstrap tokens
    r"\bSWMTKN-1-[\w-]{8,}",
    r"\bAIza[\w-]{30,}|\bya29\.[\w-]{20,}|\bGOCSPX-[\w-]{20,}",  # Google
    r"\b[rs]k_(?:live|test)_\w{16,}|\bSG\.[\w-]{16,}\.[\w-]{16,}|\bkey-[0-9a-f]{32}\b",
    r"\bnpm_\w{30,}|\bpypi-[\w-]{30,}|\brubygems_\w{30,}|\bAKCp\w{20,}|\bcmVmdGtuOj\w{20,}",
    r"\bhv[sb]\.[\w-]{20,}|\bATATT3[\w=-]{20,}|\bglsa_\w{20,}|\bgl(?:rt|dt|ft|soat|cbt)-[\w-]{16,}",
    r"\btskey-[\w-]{16,}|\bdop_v1_\w{32,}|\bdapi[0-9a-f]{32}\b|\bNRAK-\w{20,}|\bsntrys_[\w=+/-]{20,}",
    r"\bxapp-[\w-]{10,}|\b\d{8,10}:AA[\w-]{30,}|\bpul-[0-9a-f]{40}\b|\blin_api_\w{20,}|\bpscale_\w{20,}",
    r"\bAGE-SECRET-KEY-1\w{20,}|\$(?:1|2[aby]|5|6|y|apr1)\$[\w./$=+-]{16,}",
)
# addresses whose path is the secret
_HOOK = (
    r"(?:hooks\.slack\.com|discord(?:app)?\.com/api/webhooks|[\w.-]{1,80}webhook\.office\.com"
    r"|hooks\.zapier\.com|api\.telegram\.org|chat\.googleapis\.com|maker\.ifttt\.com|hc-ping\.com"
    r"|[\w.-]{1,80}\.logic\.azure\.com|events\.pagerduty\.com)"
)
_UUID = r"(?<![0-9A-Fa-f])[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}(?![0-9A-Fa-f-])"
_BARE = r"(?<![0-9A-Za-z])[0-9a-f]{32}(?![0-9A-Za-z])"
_SHORTEST_NAME = 4
# names that are also words in the doctor's input: such a host name is replaced only as a separate word
_ORDINARY = frozenset(
    {
        *("localhost", "node", "nodes", "host", "server", "worker", "master", "control", "linux", "ubuntu"),
        *("debian", "rocky", "nvidia", "docker", "containerd", "kubelet", "compute", "default", "driver"),
        *("cuda", "tesla", "hopper", "test", "root", "true", "false", "none", "local", "system", "kernel"),
    }
)


@cache
def _in_texts() -> tuple[_Rule, ...]:
    """Patterns for a whole text, and their replacements."""
    key = rf"(?P<open>(?<![\w.\-])(?P<key>{_KEY})[\"']?[ \t]*"
    toml = (
        rf"(?P<open>^[ \t]*\[\[?(?:[^\]\n]{{0,300}}\.)?\"?(?:{_SECTION})\"?\]\]?[^\n]*\n)"
        r"(?P<body>(?:(?![ \t]*\[)[^\n]*\n?)*)(?P<close>)"
    )
    braces = (
        rf"(?P<open>(?<![\w.\-])\"?(?:{_SECTION})\"?[ \t]*[:=]\s*\{{)"
        r"(?P<body>[^{}]{0,8192}(?:\{[^{}]{0,2048}\}[^{}]{0,2048}){0,40})(?P<close>\})"
    )
    indented = (
        rf"(?P<open>^(?P<indent>[ ]*)(?:{_SECTION}):[ \t]*\n)"
        r"(?P<body>(?:(?P=indent)[ ]+[^\n]*\n?)+)(?P<close>)"
    )
    block = rf"{key}:[ \t]*)[|>][-+]?\n(?:[ \t]+.*\n?)+"
    items = rf"{key}:[ \t]*\n)(?P<items>(?:[ \t]*-[ \t][^\n]*\n?)+)"
    listed = rf"{key}[=:][ \t]*\[)(?P<listed>[^\[\]]{{1,4096}})(?=\])"
    flags = re.IGNORECASE | re.MULTILINE
    pem = r"-----BEGIN ([A-Z ]*)PRIVATE KEY-----(?! REDACTED).*?(?:-----END [A-Z ]*-----|\Z)"
    return (
        ((), "|".join(f"(?:{pattern})" for pattern in _KNOWN), re.RegexFlag(0), HIDDEN),
        (("]\n",), toml, flags, _section),
        (("{",), braces, flags, _section),
        ((":",), indented, flags, _section),
        (("|", ">"), block, re.IGNORECASE, rf"\g<open>{HIDDEN}\n"),  # a YAML text of several lines
        (("- ", "-\t"), items, re.IGNORECASE, _items),
        (("[",), listed, re.IGNORECASE, _listed),
        (("-----begin",), pem, re.DOTALL, rf"-----BEGIN \1PRIVATE KEY----- {HIDDEN}"),
    )


@cache
def _in_lines() -> tuple[_Rule, ...]:
    """The same for the lines in which `_HINT` matches."""
    key = rf"(?<![\w.\-])(?P<key>{_KEY})"
    value = r"""(?P<value>\\"[^"\\\n]*\\"|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\s,;"'\[\]{}\0\\]+)"""
    flags = re.IGNORECASE
    scheme = r"(?P<scheme>(?<![\w+.-])[a-z][\w+.-]{0,30}://)[^\s/@\"'\0]+@"
    flag = rf"(?P<open>(?<![\w-])--?(?P<key>{_KEY})[ \t\0]+)(?P<value>[^\s\0-][^\s\0]*)"
    option = r"(?P<open>(?<![\w-])(?:-e|--env)[ =\0]+)"
    assigned = r"(?P<rest>[A-Za-z_]\w*=(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s\0]+))"
    account = r"(?<![\w-])(?:-u|--user|-U|--proxy-user|--creds|--src-creds|--dest-creds)[ =\0]*"
    alone = r"(?:bindpw|rootpw|requirepass|masterauth|password|secret)"
    introduction = r"(?:password|passphrase|passcode|secret|token)(?: is| was| set to|:)[ ]+"
    replacement = rf"\1{HIDDEN}"
    hook = rf"(https?://{_HOOK})/[^\s\"'\0]*"
    webhook = r"(webhook[\w.\-]{0,40}[\"']?[ \t]*[=:][ \t]*[\"']?https?://[^/\s]+)/[^\s\"']*"
    header = rf"(?P<open>(?<![\w.\-?&])x-[a-z][\w-]{{0,60}}\\?[\"']?[ \t]*[:=][ \t]*){value}"
    cookie = r"((?<![\w.\-])(?:set-)?cookie2?:[ \t]*)[^\n\"']+"
    identified = r"\b(identified (?:with \w+ )?by (?:password )?)(?:'[^'\n]*'|\"[^\"\n]*\")"
    return (
        ((), _COMMAND_LINE, flags, _command_line),
        (
            ("environment=",),
            r"(?P<open>^[ \t]*Environment=)(?P<rest>.*)",
            flags,
            _environment_line,
        ),
        (("://",), scheme, flags, rf"\g<scheme>{HIDDEN}@"),
        (("://",), hook, flags, rf"\1/{HIDDEN}"),
        (("webhook",), webhook, flags, rf"\1/{HIDDEN}"),
        ((), r"\b(bearer|basic|negotiate|digest)[ ]+[\w.~+/=-]{8,}", flags, rf"\1 {HIDDEN}"),
        (("x-",), header, flags, _hidden),
        (("cookie",), cookie, flags, replacement),
        (("=", ":"), rf"(?P<open>{key}\\?[\"']?[ \t]*[=:][ \t]*){value}", flags, _pair),
        (("-",), flag, flags, _pair),
        (("-e", "--env"), option + assigned, flags, _variable_option),
        (
            ("-u", "user", "creds"),
            rf"({account}[^\s:%\0=]{{1,80}}[:%])[^\s\0]+",
            re.RegexFlag(0),
            replacement,
        ),
        (("identified",), identified, flags, replacement),
        ((), rf"\b({introduction})[\"']?[^\s\"',;]+", flags, replacement),
        ((), rf"(^[ \t]*{alone}[ \t]+)(?![=:])\S+", flags, replacement),
        (("login",), r"(\blogin[ \t]+\S{1,80}[ \t]+password[ \t]+)\S+", flags, replacement),
        # mount options of cifs and nfs; parameters with which clouds sign addresses
        (("pass=", "pwd="), r"((?<![\w.\-])(?:pass|pwd)=)[^\s,;&\"'\0]+", flags, replacement),
        (("=",), r"([?&](?:sig|code|key|[\w-]{0,30}signature)=)[^\s&\"'\0]+", flags, replacement),
    )


# --- arguments and environments -------------------------------------------------------------------------

# programs whose flags carry secrets without a name
_CLIENTS = (
    r"curl|wget|mysql\w*|mariadb[\w-]*|sshpass|smbclient|ldap(?:search|modify|add|delete|passwd|whoami)"
    r"|redis-cli|mongo\w*|psql|pg_\w+|influx|ipmitool|skopeo|htpasswd|openssl|vault|aws|restic|rclone|lftp"
    r"|(?:docker|podman|nerdctl|helm|oras|crane|buildah)[ \t]+(?:registry[ \t]+)?login"
    r"|sqlcmd|rabbitmqctl|snmp\w+|net[ \t]+use|mount\.cifs|xfreerdp|sshfs"
)
# programs whose subcommands and arguments the doctor reads
KNOWN_PROGRAM = (
    r"(?:dockerd|rootlesskit|containerd|crio|kubelet|kubelite|k3s|rke2|k0s|microk8s|podman|gpunode"
    r"|nvidia|nv-|gpu-operator|gfd|config-manager|systemd\Z|snap\Z|modprobe\Z)"
)
_SUBCOMMAND = r"[a-z][a-z-]{1,40}|[a-z][a-z0-9]{0,30}(?:[.-][a-z][a-z-]{0,40})+"
_COMMAND_LINE = (
    r"(?P<open>^[ \t]*Exec(?:Start|Stop|Reload|Condition)\w*=[-@:+!]*|\b(?:COMMAND|CMD|_CMDLINE)=)"
    r"(?P<rest>.*)"
    r"|(?P<options>\b\w{0,60}(?:ARGS|OPTS|OPTIONS|FLAGS)=[\"']?(?=-))(?P<given>.*)"
    rf"|(?P<client>(?<![\w.-])(?:{_CLIENTS})[ \t]+)(?P<words>[^\n|;&]*)"
)
# flags that a diagnosis reads; a value of any other flag is kept only if it can't be a secret
_KEPT_FLAG = (
    r"(?:add-)?runtimes?|default-runtime|conmon|listen|address|data-?(?:dir|root)|exec-root|root(?:-dir)?|hosts?"
    r"|state(?:-dir)?|config(?:-\w+)*|[Hv]|pid-?file|exec-opts?|storage-driver|log-(?:level|driver|format)"
    r"|cgroup[\w-]*|container-runtime[\w-]*|runtime-[\w-]+|image-service-endpoint|feature-gates|containerd[\w-]*"
    r"|iptables|userland-proxy[\w-]*|[\w-]*(?:mode|strategy|policy)|pass-device-specs|resource-[\w-]+|nvidia-[\w-]+"
    r"|driver-[\w-]+|device-[\w-]+|mig-[\w-]+|mps-[\w-]+|cdi-[\w-]+|node-(?:name|ip)|hostname-override|kubeconfig"
    r"|bootstrap-kubeconfig|pod-infra-container-image|network-plugin|snapshotter|cni-[\w-]+|kubelet-arg|disable|enable"
    r"|simulate|label|group|uvm-persistence-mode|persistence-mode|registration|vendor|profile|output|command"
)
_OWN_VARIABLE = (
    r"(?:NVIDIA_(?:VISIBLE_DEVICES|DRIVER_|REQUIRE_|DISABLE_REQUIRE|MIG_|CTK_|IMEX|CONTAINER_|CONFIG|RUNTIME|VERSION|PRODUCT)"
    r"|CUDA_|MIG_|MPS_|DEVICE_(?:LIST|ID|DISCOVERY|PLUGIN)|CDI_|PASS_DEVICE|FAIL_ON|GPUNODE_|XDG_|NODE_NAME$|CONTAINER_"
    r"|CONTAINERD_|CONTAINERS_|DOCKER_(?:HOST|CONFIG|TLS_VERIFY|CERT_PATH|CONTEXT|DRIVER|OPTS|NETWORK_OPTIONS|STORAGE_OPTIONS)$"
    r"|DOCKERD_ROOTLESS_|RUNTIME|RESOURCE_NAM|ENABLE_|CONFIG_FILE$|container$|HOME$|PATH$|USER$|LD_LIBRARY_PATH$"
    r"|KUBELET_\w*(?:ARGS|OPTS)$|(?:HTTPS?|NO|ALL)_PROXY$|(?:https?|no|all)_proxy$|LANG$|LC_\w+$|GODEBUG$|GOMAXPROCS$|TZ$)"
)
_PLAIN = (
    r"[+-]?[0-9]{1,12}(?:\.[0-9]{1,6})?(?:[a-zA-Z]{1,3}|%)?"  # numbers, sizes, durations
    r"|(?:/(?:etc|usr|var|run|opt|dev|proc|sys|lib\w{0,3}|s?bin|home|root|tmp|mnt|srv|snap|host|boot|config|data|nvidia)"
    r"(?:/[\w.@+:-]{1,120})*/?)"
    r"|(?:unix|fd|npipe|vsock):/{0,3}[\w./@:-]{0,200}"
    r"|(?:(?:tcp|https?|grpc)://)?(?:[a-z0-9-]{1,63}\.)*[a-z0-9-]{1,63}:[0-9]{1,5}/?|https?://[a-z0-9.-]{1,200}/?"
    r"|[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?:/[0-9]{1,2})?|[0-9a-f:]*::[0-9a-f:]*(?:/[0-9]{1,3})?"
    r"|v?[0-9]{1,6}(?:\.[0-9]{1,6}){1,3}(?:[-+~.][a-z0-9.]{1,20})?"  # versions
    r"|[a-z0-9][a-z0-9.-]{0,200}(?::[0-9]{1,5})?(?:/[a-z0-9][a-z0-9._-]{0,100}){1,5}(?::[\w.-]{1,60})?(?:@sha256:[0-9a-f]{64})?"
    r"|\$\{?[A-Za-z_]\w{0,60}\}?|HUP|TERM|INT|QUIT|KILL|USR[12]"
    r"|systemd|cgroupfs|overlay(?:2|fs)|json-file|journald|nvidia(?:-[a-z-]{1,30})?|runc|crun|info|debug|warn(?:ing)?|error"
    r"|containerd|docker|cri-o|all|any|auto|default|local|host|private|text|json|unconfined|always|never"
)


def shown_arguments(argv: Sequence[str]) -> tuple[str, ...]:
    """A command line that is safe to show: programs, flags and values that are known to be harmless."""
    shown = list(argv[:1])
    flag = ""
    subcommands = runs_known_program(argv)
    for word in argv[1:]:
        if word.startswith("-") and word.strip("-"):
            name, equals, value = word.partition("=")
            flag = ""
            if equals:
                shown.append(f"{name}={_value(name.lstrip('-'), value)}")
            elif re.fullmatch(r"--[A-Za-z][\w.-]{0,80}|-[A-Za-z]", name) or _is_kept_flag(name.lstrip("-")):
                shown.append(word)
                flag = name.lstrip("-")
            else:  # a value directly after a short flag, such as a password
                plain = _plain(word[2:]) or re.fullmatch("-[rfvh]{2,3}", word)
                shown.append(word if plain else f"{word[:2]}{HIDDEN}")
        elif flag:
            shown.append(_value(flag, word))
            flag = ""
        else:
            is_subcommand = subcommands and re.fullmatch(_SUBCOMMAND, word) is not None
            shown.append(word if is_subcommand or _plain(word) else _value("", word))
            continue
        subcommands = False
    return tuple(shown)


def runs_known_program(argv: Sequence[str]) -> bool:
    """Whether the doctor reads these arguments. The first ones of a shell or an interpreter name the
    program."""
    names = (argument.partition(" ")[0].rpartition("/")[2] for argument in argv[:4])
    return any(re.match(KNOWN_PROGRAM, name) for name in names)


def shown_variable(assignment: str) -> str:
    """``NAME=VALUE`` that is safe to show."""
    name, equals, value = assignment.partition("=")
    if not equals or value.lower() in _HARMLESS:
        return assignment
    if secret_key(name):
        return f"{name}={HIDDEN}"
    if value[:2] == "--" or (value[:1] == "-" and " " in value):
        return f"{name}={_words(value, program=False)}"
    if re.match(_OWN_VARIABLE, name):
        return f"{name}={without_secrets(value)}"
    return f"{name}={value if _plain(value) else HIDDEN}"


def known_variable(assignment: str) -> bool:
    """Whether a diagnosis reads this variable of a process's environment."""
    return re.match(_OWN_VARIABLE, assignment.partition("=")[0]) is not None


def _is_kept_flag(flag: str) -> bool:
    return re.fullmatch(_KEPT_FLAG, flag) is not None


def _plain(value: str) -> bool:
    return value.lower() in _HARMLESS or re.fullmatch(_PLAIN, value) is not None


def _value(flag: str, value: str) -> str:
    """The value of a flag, or a separate argument if `flag` is empty."""
    if value.lower() in _HARMLESS:
        return value
    if flag in ("e", "env"):
        return shown_variable(value)
    if secret_key(flag):
        return HIDDEN
    if _plain(value):
        return value
    if _is_kept_flag(flag):
        return ",".join(map(_kept_part, value.split(",")))
    if "=" in value:
        return ",".join(map(_part, value.split(",")))
    return HIDDEN


def _kept_part(part: str) -> str:
    """The value, or one pair of a list, of a flag that is kept."""
    name, equals, value = part.partition("=")
    if equals and secret_key(name) and not _plain(value):
        return f"{name}={HIDDEN}"
    return _replaced(_replaced(part, _in_texts()[:1]), _in_lines()[_AFTER_COMMANDS:])


def _part(part: str) -> str:
    name, equals, value = part.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z][\w./-]{0,80}", name):
        return part if _plain(part) else HIDDEN
    return part if _plain(value) and not secret_key(name) else f"{name}={HIDDEN}"


def _words(text: str, *, program: bool = True) -> str:
    """A command line in a text; blanks between the words and quotes around them stay."""
    pieces = re.split(r"""([ \t\0]+|(?<![^\s])["']|["'](?=\s|$))""", text)
    words = pieces[::2]
    filled = [index for index, word in enumerate(words) if word]
    shown = shown_arguments([*([] if program else [""]), *(words[index] for index in filled)])
    for index, word in zip(filled, shown[0 if program else 1 :], strict=True):
        pieces[2 * index] = word
    return "".join(pieces)


def _command_line(match: re.Match[str]) -> str:
    if match["client"] is not None:
        return match["client"] + _words(match["words"], program=False)
    if match["options"] is not None:
        return match["options"] + _words(match["given"], program=False)
    return match["open"] + _words(match["rest"])


def _environment_line(match: re.Match[str]) -> str:
    """systemd's list of variables, each of which may be quoted (systemd.exec(5))."""
    quoted = re.compile(r"""(["'])([A-Za-z_]\w*=.*?)\1|([A-Za-z_]\w*=)("[^"\n]*"|'[^'\n]*'|\S*)""")

    def shown(match: re.Match[str]) -> str:
        if match[1]:
            return f"{match[1]}{shown_variable(match[2])}{match[1]}"
        return shown_variable(match[3] + match[4].strip("\"'"))

    return match["open"] + quoted.sub(shown, match["rest"])


def _variable_option(match: re.Match[str]) -> str:
    name, _, value = match["rest"].partition("=")
    return match["open"] + shown_variable(f"{name}={value.strip(chr(34) + chr(39))}")


def _section(match: re.Match[str]) -> str:
    """All values in a section of headers or credentials, in TOML, JSON or YAML."""
    body = re.sub(
        r"""(?P<open>[=:,\[][ \t\n]*)(?P<quote>["'])(?P<value>[^"'\n]*)(?P=quote)(?![ \t]*[:=])""",
        _quoted,
        match["body"],
    )
    body = re.sub(
        r"(?m)^(?P<open>[ \t]*(?:-[ ]+)?[\w.-]+:[ ]+)(?P<quote>)(?P<value>[^\s\"'\[{|>][^\n]*)$",
        _quoted,
        body,
    )
    return match["open"] + body + match["close"]


def _quoted(match: re.Match[str]) -> str:
    if _plain(match["value"]):
        return match[0]
    return f"{match['open']}{match['quote']}{HIDDEN}{match['quote']}"


def _items(match: re.Match[str]) -> str:
    """A YAML list, such as the values of an HTTP header."""
    if not secret_key(match["key"]):
        return match[0]
    return match["open"] + re.sub(r"(?m)^([ \t]*-[ \t])[^\n]*", rf"\1{HIDDEN}", match["items"])


def _listed(match: re.Match[str]) -> str:
    """A list in TOML or JSON, on one line or more; unquoted parts aren't text."""
    if not secret_key(match["key"]):
        return match[0]
    return match["open"] + re.sub(r"""(["'])[^"'\n]*\1""", rf"\1{HIDDEN}\1", match["listed"])


def _pair(match: re.Match[str]) -> str:
    if not secret_key(match["key"]) or match["value"].lower() in _HARMLESS:
        return match[0]
    return _hidden(match)


def _hidden(match: re.Match[str]) -> str:
    """The value's quotes stay."""
    value = match["value"]
    quote = next((mark for mark in ('\\"', '"', "'") if value.startswith(mark)), "")
    return f"{match['open']}{quote}{HIDDEN}{quote}"


def secret_key(name: str) -> bool:
    """Whether the value of this name is a secret."""
    return (
        re.fullmatch(_KEY, name, re.IGNORECASE) is not None
        and re.search(_HARMLESS_KEY, name, re.IGNORECASE) is None
    )


def without_secrets(text: str) -> str:
    """The text with every secret replaced. Quotes stay, so that JSON and TOML remain valid."""
    hint = re.compile(_HINT, re.IGNORECASE)
    if not hint.search(text):
        return _replaced(text, _in_texts()[:1])
    text = _replaced(text, _in_texts())
    lines = (_replaced(line, _in_lines()) if hint.search(line) else line for line in text.split("\n"))
    return "\n".join(lines)


def _replaced(text: str, rules: Iterable[_Rule]) -> str:
    lowered = text.lower()
    for needs, pattern, flags, instead in rules:
        if not needs or any(need in lowered for need in needs):
            text = re.sub(pattern, instead, text, flags=flags)
    return text


@dataclass(frozen=True)
class Redaction:
    """Redaction of one bundle. `names` are this node's own, `uuids` says whether UUIDs are replaced; `known`
    maps each one found to its replacement."""

    names: tuple[str, ...] = ()
    uuids: bool = False
    known: dict[str, str] = field(default_factory=dict)

    def text(self, text: str) -> str:
        """Redact a whole text, or a part of one."""
        return self.path(without_secrets(text))

    def path(self, path: str) -> str:
        """Replace names and UUIDs only: a path contains no secret."""
        for position, name in enumerate(self.names):
            path = _name_pattern(name).sub(f"host-{position + 1}", path)
        if self.uuids:
            path = re.sub(_UUID, lambda match: str(UUID(self._digits(UUID(match[0]).hex))), path)
            path = re.sub(_BARE, lambda match: self._digits(match[0]), path)
        return path

    def value(self, value: Any, key: str = "") -> Any:
        """Redact a tree of JSON values; the text, or list of texts, of a key that names a secret is a
        secret."""
        if isinstance(value, str):
            secret = key and secret_key(key) and value.lower() not in _HARMLESS
            return HIDDEN if secret else self.text(value)
        if isinstance(value, dict):
            inside = re.fullmatch(_SECTION, key, re.IGNORECASE) is not None
            return {
                self.path(str(name)): self.value(
                    item, "auth" if inside and not _plain(str(item)) else str(name)
                )
                for name, item in value.items()
            }
        if isinstance(value, list) and key.lower() in ("env", "environment"):
            return [
                self.path(shown_variable(entry)) if isinstance(entry, str) else self.value(entry)
                for entry in value
            ]
        if isinstance(value, list | tuple):
            return [self.value(item, key) for item in value]
        return value

    def _digits(self, digits: str) -> str:
        """Replace 32 digits by 32 digits; all zeros, which mean none, stay."""
        if not digits.strip("0"):
            return digits
        return self.known.setdefault(digits, f"{len(self.known) + 1:032x}")


@cache
def _name_pattern(name: str) -> re.Pattern[str]:
    if len(name) < _SHORTEST_NAME or name.lower() in _ORDINARY:
        return re.compile(rf"\A{re.escape(name)}(?=\s*\Z)", re.IGNORECASE)
    return re.compile(rf"(?<![A-Za-z0-9-]){re.escape(name)}(?![A-Za-z0-9-])", re.IGNORECASE)


def own_names(texts: Iterable[str]) -> tuple[str, ...]:
    """A node's names from its own host names: the first label and the domain of each, longest first."""
    names = set()
    for text in texts:
        label, _, domain = text.strip().partition(".")
        names |= {part for part in (label, domain) if part and part != "localhost" and part != "(none)"}
    return tuple(sorted(names, key=lambda name: (-len(name), name)))
