"""The page of a report in a real Chromium: opened as a file, two widths, both color schemes, by mouse and keys."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from muster.launch.cli import main
from support.report_runs import write_run, write_sweep

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]
HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
CONTRASTS = """
() => {
  const probe = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgb = (color) => {
    probe.clearRect(0, 0, 1, 1); probe.fillStyle = color; probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data];
  };
  const light = (color) => {
    const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = color.map((each) => linear(each / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    if (element.closest(".frame")) return rgb(getComputedStyle(element.closest(".frame").querySelector("rect")).fill);
    for (; element; element = element.parentElement) {
      const color = rgb(getComputedStyle(element).backgroundColor);
      if (color[3] === 255) return color;
    }
    return rgb(getComputedStyle(document.documentElement).colorScheme === "dark" ? "black" : "white");
  };
  const worst = {};
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || ["SCRIPT", "STYLE", "title", "desc"].includes(element.tagName) || element.disabled) continue;
    const style = getComputedStyle(element), svg = element.namespaceURI.endsWith("svg");
    const [one, other] = [light(rgb(svg ? style.fill : style.color)), light(behind(element))];
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    worst[element.tagName] = Math.min(ratio, worst[element.tagName] ?? 99);
  }
  return worst;
}
"""


@dataclass
class Opened:
    """A page, and what went wrong or left it since it was opened."""

    page: "playwright.Page"
    faults: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a sweep: two modes, two numbers of ranks, runs that failed, one that a hostile program wrote."""
    root = tmp_path_factory.mktemp("runs")
    runs = {}
    for mode in ("ddp", "allreduce"):
        for ranks in (2, 4):
            word = HOSTILE if (mode, ranks) == ("allreduce", 4) else ""
            run = write_run(root, f"{mode}-{ranks}", mode=mode, ranks=ranks, word=word, fails=ranks == 4)
            runs[f"train.mode={mode} ranks={ranks}{word}"] = run
    sweep, output = write_sweep(root, "modes", runs), root / "page.html"
    assert main(["report", sweep.name, "--runs", str(root), "--output", str(output)]) == 0
    return output


@pytest.fixture(scope="module")
def browser() -> "Iterator[playwright.Browser]":
    arguments = ["--no-sandbox"]  # which root cannot have, nor many containers
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield found
        found.close()


@pytest.fixture(scope="module", params=[(1280, "light"), (390, "dark")], ids=["desktop", "phone"])
def opened(request: pytest.FixtureRequest, browser: "playwright.Browser", report: Path) -> "Iterator[Opened]":
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    found = Opened(context.new_page())
    found.page.on("console", lambda message: found.faults.append(message.text))
    found.page.on("pageerror", lambda error: found.faults.append(str(error)))
    found.page.on("dialog", lambda dialog: (found.faults.append(dialog.message), dialog.dismiss()))
    found.page.on("request", lambda asked: found.requests.append(asked.url))
    found.page.goto(report.as_uri())
    yield found
    assert found.faults == []
    assert found.requests == [report.as_uri()]
    if shots := os.environ.get("REPORT_SHOTS"):
        found.page.screenshot(path=f"{shots}/{width}-{scheme}.png", full_page=True)
    context.close()


def test_every_picture_is_drawn_and_nothing_is_wider_than_the_page(opened: Opened) -> None:
    page = opened.page
    pictures = page.locator("svg.plot")
    assert pictures.count() == 6 + 4 * 3
    for picture in pictures.all():
        box = picture.bounding_box()
        assert box["width"] > 200
        assert box["height"] > 80
        assert picture.locator("path").count() > 5
        assert picture.locator("title").first.text_content()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("body script").count() == 2
    assert page.locator("img").count() == 0


def test_every_text_can_be_read_against_what_is_behind_it(opened: Opened) -> None:
    for each in opened.page.locator("details").all():
        each.evaluate("element => element.open = true")
    names = {"H1", "H2", "P", "TD", "TH", "CAPTION", "A", "SUMMARY", "LI", "DT", "DD", "PRE", "text"}
    for scheme in ("light", "dark"):
        opened.page.emulate_media(color_scheme=scheme)
        worst = opened.page.evaluate(CONTRASTS)
        assert names <= worst.keys()
        assert {name: ratio for name, ratio in worst.items() if ratio < 4.5} == {}
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_links_and_controls_work_by_mouse_and_keyboard(opened: Opened) -> None:
    page = opened.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.locator(".skip").bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    targets = [link.get_attribute("href") for link in page.locator("a").all()]
    assert len(targets) == 1 + 2 + 4
    for target in targets:
        assert page.locator(target).count() == 1
    page.locator("nav a").last.click()
    assert page.evaluate("location.hash") == "#run-4"
    for each in page.locator("details").all():
        before = each.evaluate("element => element.open")
        each.locator("summary").focus()
        page.keyboard.press("Enter")
        assert each.evaluate("element => element.open") != before


def test_a_flame_graph_is_enlarged_by_mouse_and_by_keys(opened: Opened) -> None:
    page = opened.page
    graph = page.locator("svg.flame").first
    frames = {each.get_attribute("aria-label").partition(":")[0]: each for each in graph.locator(".frame").all()}
    assert frames.keys() == {"all", "forward", "backward", "MmBackward0", "aten"}
    whole, whole_width = page.locator(".whole").first, frames["all"].bounding_box()["width"]

    def width(name: str) -> float:
        return round((frames[name].bounding_box() or {"width": 0.0})["width"] / whole_width, 1)

    assert (width("forward"), width("backward"), whole.is_disabled()) == (0.4, 0.6, True)
    frames["backward"].click()
    assert (width("all"), width("backward"), width("forward")) == (1.0, 1.0, 0.0)
    whole.click()
    assert (width("forward"), width("backward"), whole.is_disabled()) == (0.4, 0.6, True)
    for key in ("ArrowDown", "ArrowRight", "ArrowDown", "ArrowUp", "ArrowLeft", "ArrowRight"):
        page.keyboard.press(key)
    name = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert page.locator(".about").first.text_content() == name
    assert name.startswith("backward: 60 ms, 60.0%")
    page.keyboard.press("Enter")
    assert width("backward") == 1.0
    page.keyboard.press("Escape")
    assert (width("forward"), width("backward")) == (0.4, 0.6)
