"""Edits while the plugin serves: detected, and applied completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Event

import pytest

from gpunode.commands.session import ReceivedSignals
from gpunode.errors import ConfigError
from gpunode.host import Host
from gpunode.plugin.config.resolve import OptionSources
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.config.watch import ConfigWatch
from gpunode.plugin.serve import PluginService
from tests.plugin.config.resolving import sources
from tests.plugin.fakes import FakeBackend, FakeChecker
from tests.plugin.kubelet_stub import KubeletStub
from tests.plugin.nodes import AtOnce, MemoryLog, eventually

GOOD = "version: v1\nflags: {migStrategy: single}\n"
BETTER = "version: v1\nflags: {migStrategy: mixed}\nresources: {exclude: [3]}\n"
BAD = "version: v1\nflags: {migStrategy: every}\nnope: 1\n"


class Owner:
    """The owner of the settings."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.config_trouble = ""
        self.looked = 0
        self.refusal = ""

    def hurry(self) -> None:
        self.looked += 1

    def configure(self, settings: Settings) -> None:
        if self.refusal:
            raise ConfigError(self.refusal)
        self.settings = settings


class Watched:
    def __init__(self, file: Path, **flags: str) -> None:
        source = sources(flags, file=file)
        resolved = source.resolve()
        self.owner = Owner(resolved.valid_settings())
        self.signals = ReceivedSignals()
        self.log = MemoryLog()
        self.watch = ConfigWatch(
            self.owner,
            self.log,
            self.owner.hurry,
            source,
            self.signals.take_hangup,
            resolved.content,
            AtOnce(),
        )
        self.now = 0.0
        self.tick(2)

    def tick(self, seconds: float) -> None:
        """As the link thread runs it, four times a second."""
        for _ in range(int(seconds * 4)):
            self.now += 0.25
            wait = self.watch.tick(self.now)
            assert wait is None or wait >= 0.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "config.yaml"
    made.write_text(GOOD)
    return made


@pytest.fixture
def watched(file: Path) -> Watched:
    return Watched(file)


def test_unchanged_file_causes_no_action_and_no_log(watched: Watched, file: Path) -> None:
    file.touch()
    watched.tick(5)
    assert watched.log.lines == []


def test_edit_is_applied_within_a_second(watched: Watched, file: Path) -> None:
    file.write_text(BETTER)
    watched.tick(1)
    assert (watched.owner.settings.mig_strategy, watched.owner.settings.exclude) == ("mixed", ("3",))
    assert watched.log.lines == [
        ("info", "config file loaded", {"file": str(file), "changed": "mig-strategy, exclude"})
    ]


def test_invalid_edit_changes_nothing_and_is_reported_once_with_every_problem(
    watched: Watched, file: Path
) -> None:
    file.write_text(BAD)
    watched.tick(10)
    assert watched.owner.settings.mig_strategy == "single"
    assert watched.log.messages("error") == [
        "the config file was rejected; the last valid one stays active",
        f"{file}:2: flags.migStrategy: 'every' is not one of none, single, mixed",
        f"{file}:3: nope: unknown key; known here: version, flags, resources, sharing, imex, health",
    ]
    assert watched.owner.config_trouble != ""
    file.write_text(GOOD)
    watched.tick(1)
    assert watched.owner.config_trouble == ""


def test_partially_written_file_is_not_reported(watched: Watched, file: Path) -> None:
    for end in range(0, len(BETTER), 7):
        file.write_text(BETTER[:end])
        watched.tick(0.25)
    file.write_text(BETTER)
    watched.tick(1)
    assert watched.owner.settings.mig_strategy == "mixed"
    assert watched.log.messages("error") == []


def test_swap_of_a_config_map_is_detected(tmp_path: Path) -> None:
    for name, text in (("one", GOOD), ("two", BETTER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
    data, file = tmp_path / "..data", tmp_path / "config.yaml"
    data.symlink_to("one")
    file.symlink_to("..data/config.yaml")
    watched = Watched(file)
    (tmp_path / "new").symlink_to("two")
    os.replace(tmp_path / "new", data)
    watched.tick(1)
    assert watched.owner.settings.mig_strategy == "mixed"


def test_config_manager_link_may_be_missing_for_a_moment_or_lead_to_dev_null(tmp_path: Path) -> None:
    (tmp_path / "named").write_text(GOOD)
    file = tmp_path / "config.yaml"
    file.symlink_to("named")
    watched = Watched(file)
    file.unlink()
    watched.tick(0.25)
    file.symlink_to("/dev/null")
    watched.tick(1)
    assert watched.owner.settings.mig_strategy == "none"
    assert watched.log.messages("error") == []


def test_removed_file_keeps_the_last_valid_settings(watched: Watched, file: Path) -> None:
    file.unlink()
    watched.tick(5)
    assert watched.owner.settings.mig_strategy == "single"
    assert watched.log.messages("error")[1:] == [f"{file} does not exist"]
    file.write_text(GOOD)
    watched.tick(1)
    assert watched.owner.config_trouble == ""


def test_settings_impossible_on_this_node_keep_the_last_valid_ones(watched: Watched, file: Path) -> None:
    watched.owner.refusal = "two entries share GPU 0"
    file.write_text(BETTER)
    watched.tick(5)
    assert watched.owner.settings.mig_strategy == "single"
    assert "two entries share GPU 0" in watched.owner.config_trouble


def test_options_that_need_a_restart_are_named_and_the_rest_applied(watched: Watched, file: Path) -> None:
    changes = "{listen: ':9400', registration: watcher, labels: [file]}"
    file.write_text(f"flags: {{migStrategy: mixed, gpunode: {changes}}}\n")
    watched.tick(1)
    assert (watched.owner.settings.mig_strategy, watched.owner.settings.listen) == ("mixed", "")
    assert watched.owner.settings.labels.to == ()
    assert watched.log.lines[-1] == (
        "warning",
        "these changes need a restart",
        {"options": "--registration, --listen, --labels"},
    )


def test_flag_takes_precedence_over_an_edit(file: Path) -> None:
    watched = Watched(file, mig_strategy="none")
    file.write_text(BETTER)
    watched.tick(1)
    assert (watched.owner.settings.mig_strategy, watched.owner.settings.exclude) == ("none", ("3",))


def test_sighup_polls_the_gpus_and_the_file_at_once(watched: Watched, file: Path) -> None:
    file.write_text(BETTER)
    watched.signals.hung_up = True
    watched.tick(0.25)
    assert watched.owner.looked == 1
    assert watched.owner.settings.mig_strategy == "mixed"


def test_sighup_without_a_file_polls_the_gpus() -> None:
    source = sources()
    owner, signals = Owner(Settings()), ReceivedSignals()
    watch = ConfigWatch(owner, MemoryLog(), owner.hurry, source, signals.take_hangup, b"")
    signals.hung_up = True
    for now in (0.0, 0.25):
        watch.tick(now)
    watch.close()
    assert owner.looked == 1


def test_slow_work_does_not_block_the_main_loop(file: Path) -> None:
    source, owner, signals = sources(file=file), Owner(Settings()), ReceivedSignals()
    begun, go = Event(), Event()

    def configure(settings: Settings) -> None:
        begun.set()
        assert go.wait(30)
        Owner.configure(owner, settings)

    owner.configure = configure  # type: ignore[method-assign]
    watch = ConfigWatch(owner, MemoryLog(), owner.hurry, source, signals.take_hangup, b"")
    signals.hung_up = True
    watch.tick(0.0)
    assert begun.wait(30)
    signals.hung_up = True
    watch.tick(1.0)
    assert (owner.looked, signals.hung_up) == (1, True)  # it comes next
    go.set()

    def taken() -> bool:
        watch.tick(2.0)
        return owner.looked == 2

    assert eventually(taken)
    assert owner.settings.mig_strategy == "single"


def test_write_of_the_file_takes_effect_in_a_service_without_other_events(short: Path) -> None:
    (short / "etc").mkdir()
    file, host = short / "etc/plugin.yaml", Host(short, {})
    file.write_text(GOOD)
    source = OptionSources(host, {"config_file": ["/etc/plugin.yaml"], "registration": ["watcher"]})
    resolved = source.resolve()
    log, backend = MemoryLog(), FakeBackend({"nvidia.com/gpu": 2})
    service = PluginService(host, resolved.valid_settings(), log, backend, FakeChecker())
    take = ReceivedSignals().take_hangup
    service.parts.append(ConfigWatch(service.ledger, log, backend.hurry, source, take, resolved.content))
    kubelet = KubeletStub(host)
    kubelet.start()
    service.start()
    try:
        assert eventually(lambda: service.ready), service.status
        file.write_text(BETTER)
        assert eventually(lambda: service.settings.mig_strategy == "mixed"), log.lines
    finally:
        service.stop()
        service.join()
        kubelet.stop()
