"""The doctor's page in a real browser: it renders, its filters work, and no request leaves it."""

import json
import os

import pytest

from fixtures.browser import browser, program
from fixtures.machines import machine, recorded_host
from gpunode.commands.demo import build_machine
from tests.cli import gpunode

CI = os.environ.get("CI") == "true"
pytestmark = [
    pytest.mark.xdist_group("doctor_page"),
    pytest.mark.full,
    pytest.mark.skipif(program() is None and not CI, reason="chromium isn't installed"),
]
SHOWN = (
    "[...document.querySelectorAll('[data-state]')].filter(one => one.checkVisibility()).map(one => one.id)"
)
VISIBLE = "[...document.querySelectorAll('[data-state]:not([hidden])')].map(one => one.id)"
HOSTILE = '<img src=x onerror="fetch(`http://192.0.2.1/`)"><script>document.title="owned"</script>{{data}}'


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


def page_of(root, path, *more):
    ran = gpunode("--root", str(root), "doctor", "--output-file", str(path), *more)
    assert ran.out == "" and path.is_file(), ran.err
    return path.as_uri()


@pytest.fixture(scope="module")
def mismatch(tmp_path_factory):
    place = tmp_path_factory.mktemp("page")
    return page_of(recorded_host("driver-lib-mismatch", place / "m").root, place / "node.html")


def test_page_renders_its_embedded_report(tab, mismatch):
    tab.open(mismatch)
    report = json.loads(tab.value("document.getElementById('report').textContent"))
    assert report["kind"] == "DoctorReport"
    assert tab.value("document.querySelector('.verdict').textContent") == "1 error"
    assert "reboot" in tab.value("document.querySelector('.card.first').textContent")
    listed = tab.value("[...document.querySelectorAll('[data-state]')].map(one => one.id)")
    assert sorted(listed) == sorted(one["id"] for one in report["data"]["findings"])
    assert tab.value(SHOWN) == ["driver-lib-mismatch"]  # the layers are collapsed
    assert tab.value("document.documentElement.scrollWidth <= window.innerWidth")


def test_page_sends_no_request(tab, mismatch):
    tab.requests.clear()
    tab.open(mismatch)
    tab.value("document.querySelectorAll('button').forEach(one => one.click())")
    assert [one for one in tab.requests if one != mismatch] == []
    assert tab.value("performance.getEntriesByType('resource').length") == 0


def test_content_security_policy_refuses_requests_of_scripts(tab, mismatch):
    tab.open(mismatch)
    refused = tab.value("fetch('http://192.0.2.1/').then(() => 'sent', error => 'refused')")
    assert refused == "refused"
    tab.complaints.clear()


def choose(tab, text="", layer="", states=None):
    tab.value(
        f"""(() => {{
        document.getElementById('reset').click();
        document.getElementById('text').value = {json.dumps(text)};
        document.getElementById('layer').value = {json.dumps(layer)};
        const wanted = {json.dumps(states)};
        for (const box of document.querySelectorAll('input[name=state]'))
          box.checked = wanted === null || wanted.includes(box.value);
        document.getElementById('filters').dispatchEvent(new Event('input'));
        }})()"""
    )
    return tab.value(VISIBLE)


def test_filters_hide_and_show_checks(tab, mismatch):
    tab.open(mismatch)
    findings = json.loads(tab.value("document.getElementById('report').textContent"))["data"]["findings"]
    everything = choose(tab)
    assert len(everything) == len(findings)
    docker = choose(tab, layer="docker")
    assert docker and set(docker) == {one["id"] for one in findings if one["layer"] == "docker"}
    assert choose(tab, states=["fail"]) == ["driver-lib-mismatch"]
    waiting = choose(tab, states=["waits"])
    assert set(waiting) == {one["id"] for one in findings if one["blockedBy"]}
    assert "driver-lib-mismatch" in choose(tab, text="LIB mismatch")
    assert tab.value("document.getElementById('shown').textContent").endswith(f"of {len(findings)} checks")
    assert choose(tab, text="no such word at all") == []
    tab.value("document.getElementById('reset').click()")
    assert tab.value(VISIBLE) == everything


def test_search_result_in_a_collapsed_layer_is_visible(tab, mismatch):
    tab.open(mismatch)
    choose(tab, text="toolkit-missing")
    assert "toolkit-missing" in tab.value(SHOWN)


def test_link_to_a_hidden_check_shows_it(tab, mismatch):
    tab.open(mismatch)
    choose(tab, states=["fail"])
    tab.value("location.hash = 'toolkit-missing'")
    tab.value("new Promise(done => setTimeout(done, 200))")
    assert "toolkit-missing" in tab.value(SHOWN)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_light_and_dark(scheme, tab, mismatch):
    """WCAG 2.1's contrast of 4.5 for every text, against the nearest background behind it."""
    tab.scheme(scheme)
    tab.open(mismatch)
    tab.value("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    poor = tab.value(CONTRAST)
    tab.scheme("light")
    assert poor == []


CONTRAST = """(() => {
  const parts = (color) => (color.match(/[0-9.]+/g) || []).map(Number);
  const light = (color) => {
    const [r, g, b] = parts(color).map((one) => one / 255)
      .map((one) => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (parts(color).length < 4 || parts(color)[3] > 0) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const poor = new Set();
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some((one) => one.nodeType === 3 && one.textContent.trim());
    if (!own || !node.checkVisibility() || ['SCRIPT', 'OPTION'].includes(node.tagName)) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(behind(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.add(node.tagName + '.' + node.className);
  }
  return [...poor];
})()"""


def test_page_fits_a_phone_and_shows_the_first_command(tab, mismatch):
    size = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    tab.ask("Emulation.setDeviceMetricsOverride", **size)
    tab.open(mismatch)
    fits = tab.value("document.documentElement.scrollWidth <= 360")
    command = tab.value("document.querySelector('.card.first pre').getBoundingClientRect().bottom")
    tab.value("window.scrollTo(0, document.querySelector('.finding').offsetTop)")
    covered = tab.value("document.getElementById('filters').getBoundingClientRect().bottom")
    tab.ask("Emulation.clearDeviceMetricsOverride")
    assert fits and command < 740 and covered <= 0


def test_copy_button_has_a_label_with_its_check(tab, mismatch):
    tab.open(mismatch)
    labels = "[...document.querySelectorAll('.fix button')].map(one => one.getAttribute('aria-label'))"
    steps = [f"Copy the command of step {number} of driver-lib-mismatch" for number in range(1, 5)]
    assert tab.value(labels) == steps


def test_print_shows_everything_and_the_screen_is_restored(tab, mismatch):
    closed = "document.querySelectorAll('details:not([open])').length"
    tab.open(mismatch)
    before = tab.value(closed)
    assert before > 0
    tab.value("window.dispatchEvent(new Event('beforeprint'))")
    assert tab.value(closed) == 0
    tab.value("window.dispatchEvent(new Event('afterprint'))")
    assert tab.value(closed) == before


def test_untrusted_text_of_a_node_stays_text(tab, tmp_path):
    spec = machine("docker-not-restarted")
    spec["files"]["/proc/sys/kernel/hostname"] = HOSTILE + "\n"
    spec["files"]["/etc/docker/daemon.json"] = json.dumps({"runtimes": {HOSTILE: {"path": HOSTILE}}})
    address = page_of(build_machine(spec, tmp_path / "m"), tmp_path / "evil.html")
    tab.requests.clear()
    tab.open(address)
    assert tab.value("document.querySelector('h1').textContent") == HOSTILE
    assert tab.value("document.images.length") == 0
    assert tab.value("document.title") != "owned"
    assert [one for one in tab.requests if one != address] == []


@pytest.mark.parametrize("name", ["healthy-h100", "healthy-wsl2", "pci-no-gpu"])
def test_page_of_every_kind_of_node_logs_no_error(name, tab, tmp_path):
    address = page_of(recorded_host(name, tmp_path / "m").root, tmp_path / "node.html")
    tab.complaints.clear()
    tab.open(address)
    assert tab.value("document.querySelector('.verdict').textContent")
    assert tab.value("document.getElementById('filters').hidden") is False
    assert tab.complaints == []


def test_page_is_complete_without_javascript(tab, mismatch):
    tab.ask("Emulation.setScriptExecutionDisabled", value=True)
    tab.open(mismatch)
    tab.value("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    shown, everything = tab.value(SHOWN), tab.value(VISIBLE)
    dead = (
        "[...document.querySelectorAll('button, input, select')].filter(one => one.checkVisibility()).length"
    )
    useless = tab.value(dead)
    tab.ask("Emulation.setScriptExecutionDisabled", value=False)
    assert shown == everything and len(shown) > 100
    assert useless == 0
