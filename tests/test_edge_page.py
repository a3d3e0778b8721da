"""The status page in a real browser before a real edge: what it shows, what it refuses, and that everybody can read it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_edge_access import KEY, bearer

from kvcdn.access.grant import Grant, Scope
from kvcdn.edge.launch import RunningEdge
from kvcdn.stores.folder import FolderStore
from support import browser
from support.blocks import Document
from support.browser import Browser, running_browser
from support.edge_process import ask, ask_match, running_edge, settle

pytestmark = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())

HOSTILE = "<img src=icon.svg onerror='window.harmed=1'>"
"""A model's name, as settings may have it: the only free text on the page."""

SCREENS = [(1280, 900, "light"), (1280, 900, "dark"), (360, 740, "light"), (360, 740, "dark")]

SHOWN = "return !document.getElementById('figures').hidden"

LOOK = "document.dispatchEvent(new Event('visibilitychange'))"
"""The page asks at once, as when its tab comes to the front."""

CONTRASTS = """
const parse = (text) => {
  const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
  return [r, g, b, a];
};
const light = ([r, g, b]) => {
  const [x, y, z] = [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const ground = (node) => {
  for (; node; node = node.parentElement) {
    const colour = parse(getComputedStyle(node).backgroundColor);
    if (colour[3] === 1) return colour;
  }
  return [255, 255, 255, 1];
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !node.getClientRects().length || node.closest("noscript, .hidden, .skip")) continue;
  const style = getComputedStyle(node);
  const ink = parse(node.closest("svg") ? style.fill : style.color);
  const [one, two] = [light(ink), light(ground(node))].sort((a, b) => b - a);
  found.push([(one + 0.05) / (two + 0.05), walker.currentNode.data.trim().slice(0, 40)]);
}
return found.sort((a, b) => a[0] - b[0]);
"""
"""Contrast of every text that is shown with what is behind it (WCAG 2.2, 1.4.3), worst first."""


ODD = "return document.body.innerText.match(/[0-9]e[+-]|NaN|undefined|Infinity|null/g) || []"
"""Numbers that are no words for people."""


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory, document: Document) -> str:
    folder = tmp_path_factory.mktemp("origin")
    document.publish(FolderStore(folder))
    return str(folder)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory, document: Document, origin: str) -> Iterator[RunningEdge]:
    """An open edge that has delivered a document twice."""
    tag = str(document.model.tag)
    names = {"model_names": {HOSTILE: tag}, "prefill_speeds": {HOSTILE: 1000.0}}
    with running_edge(origin, tmp_path_factory.mktemp("cache"), capacity="10MB", **names) as running:
        ask_match(running.url, document.model.tag, document.addresses)
        for _ in range(2):
            for key in document.objects:
                assert 200 == ask(running.url, "/" + key).status
            settle(running.url)
        yield running


def share(status: dict) -> str:
    """The hit ratio by bytes, in the page's words."""
    return f"{100 * status['traffic']['hit_bytes'] / status['traffic']['bytes']:.1f}\u00a0%"


@pytest.fixture
def page(window: Browser, edge: RunningEdge) -> Browser:
    window.look(1280, 900)
    window.go(edge.url + "/")
    window.wait(SHOWN)
    window.complaints()
    return window


def test_it_shows_what_the_edge_says(page: Browser, edge: RunningEdge, document: Document) -> None:
    """Ratio, bytes, tokens, time, disk, origin, hot, tenants and models, as /v1/status has them."""
    status = ask(edge.url, "/v1/status").json()
    traffic, saved = status["traffic"], status["saved"]
    assert share(status) == page.text("#ratio")
    assert f"{traffic['bytes'] / 1e6:.2f} MB" == page.text("#delivered")
    assert saved["prefill_tokens"] >= 5000
    assert f"{saved['prefill_tokens']:,.0f} tokens" == page.text("#saved")
    assert f"{saved['prefill_seconds']:.1f} s of prefilling" == page.text("#saved-more")
    assert f"{saved['origin_bytes'] / 1e6:.2f} MB" == page.text("#avoided")
    assert "Up" in page.text("#origins")
    assert document.addresses[-1][:12] in page.text("#prefixes")
    assert document.addresses[0][:12] in page.text("#objects")
    assert f"stored {len(document.objects)}" == " ".join(page.text("#fills").lower().split())
    assert page.text("#tenants").splitlines()[1].startswith("local")
    assert "10.0 MB" in page.text("#disk")


def test_names_are_text(page: Browser) -> None:
    """What looks like markup is shown as it is written, everywhere, and does nothing."""
    assert HOSTILE in page.text("#models")
    assert HOSTILE in page.run("return document.querySelector('#prefixes td.text').textContent")
    assert [0, None] == page.run("return [document.querySelectorAll('main img').length, window.harmed]")


def test_it_needs_nothing_from_elsewhere_and_allows_nothing(page: Browser, edge: RunningEdge) -> None:
    """Every resource is the edge's; a script that found a way into the page does not run, and reaches nobody."""
    loaded = page.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert loaded
    assert [] == [name for name in loaded if not name.startswith(edge.url + "/")]
    assert [] == page.complaints()
    page.run("const s = document.createElement('script'); s.textContent = 'window.harmed = 1'; document.body.append(s)")
    page.run("document.body.insertAdjacentHTML('beforeend', '<p style=\"color:red\" onclick=\"window.harmed=1\" id=bad>x</p>')")
    page.run("document.getElementById('bad').click()")
    page.run("fetch('http://127.0.0.1:9/').catch(() => { window.kept = 1 })")
    page.wait("return window.kept")
    assert page.run("return window.harmed") is None
    assert 4 <= len([line for line in page.complaints() if "Content Security Policy" in line])


def test_it_follows_the_edge(page: Browser, edge: RunningEdge, document: Document) -> None:
    """What is delivered later is there without a reload."""
    before = page.text("#delivered-more")
    assert 200 == ask(edge.url, "/" + next(iter(document.blocks))).status
    page.run(LOOK)
    page.wait("return document.getElementById('delivered-more').innerText !== arguments[0]", before)


@pytest.mark.parametrize(("width", "height", "scheme"), SCREENS)
def test_everybody_can_read_it(window: Browser, edge: RunningEdge, width: int, height: int, scheme: str) -> None:
    """On any screen, light or dark: contrast of at least 4.5, nothing beside the screen, nothing smaller than 12 pixels."""
    window.look(width, height, scheme)
    window.go(edge.url + "/")
    window.wait(SHOWN)
    found = window.run(CONTRASTS)
    assert len(found) > 60
    assert 4.5 <= found[0][0], found[:5]
    dark = window.run("return getComputedStyle(document.body).backgroundColor") == "rgb(17, 22, 27)"
    assert (scheme == "dark") is dark
    assert [] == window.run(ODD)
    assert window.run("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    small = "[...document.querySelectorAll('main *')].filter((n) => parseFloat(getComputedStyle(n).fontSize) < 12)"
    assert 0 == window.run(f"return {small}.length")


def test_who_cannot_see_it_is_told_the_same(page: Browser, edge: RunningEdge) -> None:
    """The accessibility tree names charts with their figures, the disk's share, headings, and regions that scroll."""
    page.command("Accessibility.enable")
    nodes = page.command("Accessibility.getFullAXTree")["nodes"]
    told = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    images = [name for role, name in told if role in ("image", "img")]
    assert any(f"{share(ask(edge.url, '/v1/status').json())} by bytes" in name for name in images), images
    assert any("delivered" in name and "from the origin" in name for name in images)
    assert [("meter", "Disk")] == [found for found in told if found[0] == "meter"]
    headings = [name for role, name in told if role == "heading"]
    assert {"kvcdn edge", "Disk", "Origins", "Hot prefixes", "Tenants", "Models"} <= set(headings)
    assert [] == [found for found in told if found[0] in ("region", "RadioButton", "radio", "button") and not found[1]]
    assert {"columnheader"} <= {role for role, _ in told}


def test_a_keyboard_is_enough(page: Browser, edge: RunningEdge) -> None:
    """Tab reaches the link, the span, the table and what scrolls; an arrow chooses the day; a table tells the chart."""
    reached = []
    for _ in range(8):
        page.press("\ue004")
        reached.append(page.run("const a = document.activeElement; return a.id || a.name || a.className || a.localName"))
    assert ["skip", "span", "summary"] == reached[:3]
    assert "scroll" in reached
    page.run("document.querySelector('input[name=span]:checked').focus()")
    page.press("\ue014")
    page.wait("return document.getElementById('ratio-chart').getAttribute('aria-label').includes('24 hours')")
    page.run("document.querySelector('summary').focus()")
    page.press("\ue007")
    page.wait("return document.querySelectorAll('#history tbody tr').length")
    assert share(ask(edge.url, "/v1/status").json()) in page.text("#history")


def test_it_stands_still_for_who_asks_for_that(window: Browser, edge: RunningEdge) -> None:
    """prefers-reduced-motion: no transition, no animation."""
    moving = """return [...document.querySelectorAll('*')].filter((n) => {
      const s = getComputedStyle(n);
      return s.transitionDuration !== '0s' || s.animationName !== 'none';
    }).length"""
    window.go(edge.url + "/")
    window.wait(SHOWN)
    for reduced in (False, True):
        window.look(1280, 900, reduced_motion=reduced)
        assert (window.run(moving) == 0) is reduced


def test_an_edge_that_is_gone_is_told(window: Browser, origin: str, tmp_path: Path) -> None:
    """The last figures stay and are marked; an edge that is back is live again."""
    window.look(1280, 900)
    with running_edge(origin, tmp_path / "cache") as edge:
        window.go(edge.url + "/")
        window.wait(SHOWN)
        listen = edge.url.removeprefix("http://")
    window.run(LOOK)
    window.wait("return document.getElementById('state').innerText === 'Not reachable'")
    assert window.run(SHOWN)
    with running_edge(origin, tmp_path / "cache", listen=listen):
        window.run(LOOK)
        window.wait("return document.getElementById('state').innerText === 'Live'")


def test_a_token_is_asked_for_and_stays_in_the_tab(window: Browser, origin: str, tmp_path: Path) -> None:
    """Nothing is shown before; wrong ones are refused with a reason; it is in no URL, cookie or log; it can be forgotten."""
    issuers = tmp_path / "issuers"
    issuers.write_text(f"{KEY.public.text}\n", encoding="utf-8")
    right, poor = (bearer(Grant("op", frozenset((scope,))))["Authorization"].split()[1] for scope in (Scope.STATS, Scope.READ))
    window.look(360, 740, "dark")
    with running_edge(origin, tmp_path / "cache", issuers_file=issuers) as edge:
        window.go(edge.url + "/")
        window.wait("return !document.getElementById('entry').hidden")
        assert not window.run(SHOWN)
        assert 4.5 <= window.run(CONTRASTS)[0][0]
        for wrong, words in (("not-a-token", "expired"), (poor, "scope stats"), ("spaces in it", "not a token")):
            window.type("#token", wrong + "\ue007")
            window.wait("return document.getElementById('refused').innerText.includes(arguments[0])", words)
        window.type("#token", right + "\ue007")
        window.wait(SHOWN)
        assert [] == window.run(ODD)
        assert f"{edge.url}/" == window.run("return location.href")
        assert ["", 0] == window.run("return [document.cookie, localStorage.length]")
        window.go(edge.url + "/")
        window.wait(SHOWN)
        window.run("document.getElementById('forget').click()")
        window.wait("return !document.getElementById('entry').hidden")
        assert 0 == window.run("return sessionStorage.length")
        log = edge.log()
    assert right not in log
    assert poor not in log
