"""The page in a browser: it loads nothing else, shows everything, and its controls work."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

import feddbe
from feddbe.callbacks.base import Callback
from feddbe.reporting.html.blocks import ReportRuns
from feddbe.reporting.html.page import page_content, render, write_report
from feddbe.runs.store import RunStore
from tests.crafted import RunFile
from tests.html.conftest import SMALL

CHROMIUM, DRIVER = shutil.which("google-chrome") or shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER) and not os.environ.get("CI"),
    reason="no chromium and chromedriver here (Debian: chromium, chromium-driver)",
)
NAME = "<script>window.hacked = 1</script>"
FOLDER = '"><img src=x onerror=hacked=2>'


class Page:
    """A page that is open in the browser."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver: Any = driver

    def open(self, address: str, *, width: int = 1200, dark: bool = False) -> Page:
        self.clear_logs()
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.set_theme(dark=dark)
        self.driver.get(address)
        self.until(lambda: not self.script("return painting()"), "everything is drawn")
        return self

    def clear_logs(self) -> None:
        """Discard the logs of other pages."""
        self.driver.get("about:blank")
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)

    def set_theme(self, *, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def script(self, text: str, *values: Any) -> Any:
        helpers = """
            const canvases = () => [...document.querySelectorAll('canvas')];
            const colors = (canvas) => {
                const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
                const counts = {};
                for (let i = 0; i < data.length; i += 4) {
                    const key = data.slice(i, i + 4).join();
                    counts[key] = (counts[key] || 0) + 1;
                }
                return counts;
            };
            const painting = () => !canvases().length || canvases().some((c) => c.width === 300);
        """
        return self.driver.execute_script(helpers + text, *values)

    def find(self, selector: str) -> WebElement:
        element: WebElement = self.driver.find_element(By.CSS_SELECTOR, selector)
        return element

    def texts(self, selector: str) -> list[str]:
        query = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return list(self.script(query, selector))

    def until(self, condition: Callable[[], Any], description: str) -> None:
        WebDriverWait(self.driver, 30, 0.05).until(lambda _: condition(), description)

    def logged_errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in urls if not url.startswith("data:")]


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    assert CHROMIUM, "CI needs chromium"
    assert DRIVER, "CI needs chromedriver"
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for switch in (
        "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
        "--disable-background-networking", "--disable-component-update",
    ):  # fmt: skip
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield Page(driver)
    driver.quit()


@contextlib.contextmanager
def _serve(folder: Path) -> Iterator[str]:
    """Start the live server for the runs in a folder, and yield its address."""
    command = [sys.executable, "-m", "feddbe", "report", "--live", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().split()[1]
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def file(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folders = sorted(path.parent for path in runs.rglob("run.sqlite"))
    return write_report(folders, tmp_path_factory.mktemp("page") / "report.html").as_uri()


@pytest.fixture(scope="module")
def opened_page(page: Page, file: str) -> Page:
    """Return an open page for tests that do not change it."""
    return page.open(file)


def test_page_loads_without_errors_and_requests(page: Page, file: str) -> None:
    page.open(file)
    assert page.requests() == [file]
    assert page.logged_errors() == []
    assert len(page.texts("section")) == 13


def test_every_figure_has_marks(opened_page: Page) -> None:
    """A canvas has many pixels in colors that are not gray."""
    script = """
        const vivid = (key) => {
            const [r, g, b, a] = key.split(',').map(Number);
            return a > 100 && Math.max(r, g, b) - Math.min(r, g, b) > 40;
        };
        return canvases().map((canvas) => [
            canvas.closest('figure').id,
            Object.entries(colors(canvas)).filter(([key]) => vivid(key)).reduce((sum, [, n]) => sum + n, 0),
        ]);
    """
    colored_pixels = opened_page.script(script)
    assert {name for name, _ in colored_pixels} == {
        f"figure-{name}"
        for name in (
            "learning", "heat", "ranks", "differences", "new_clients", "labels", "mdl-quick", "probe-all",
            "discrepancy", "tsne",
        )
    }  # fmt: skip
    assert [name for name, count in colored_pixels if count < 200] == []


def test_every_figure_has_a_caption_a_description_and_numbers(opened_page: Page) -> None:
    for figure in opened_page.driver.find_elements(By.TAG_NAME, "figure"):
        assert figure.find_element(By.TAG_NAME, "figcaption").text
        images = figure.find_elements(By.CSS_SELECTOR, "[role=img]")
        assert images
        assert all(len(image.get_attribute("aria-label") or "") > 10 for image in images)
        details = figure.find_element(By.TAG_NAME, "details")
        details.find_element(By.TAG_NAME, "summary").click()
        find_cells = partial(details.find_elements, By.CSS_SELECTOR, "tbody tr td")
        opened_page.until(find_cells, "numbers")


@pytest.mark.parametrize("press", ["click", "key"])
def test_pressing_a_header_sorts_the_table(page: Page, file: str, press: str) -> None:
    page.open(file)

    def sort() -> None:
        button = page.find("#runs-sort-3")
        if press == "click":
            button.click()
        else:
            button.send_keys(Keys.ENTER)

    def values() -> list[float]:
        return [float(text) for text in page.texts("#table-runs tbody td:nth-child(4)")]

    before = values()
    assert len(set(before)) > 1
    sort()
    assert values() == sorted(before, reverse=True)
    assert page.find("#table-runs th:nth-child(4)").get_attribute("aria-sort") == "descending"
    sort()
    assert values() == sorted(before)
    page.find("#runs-sort-0").click()
    dbe = "fedavg+dbe(kappa=0.5)"
    assert page.texts("#table-runs tbody th") == [f"{m}, seed {s}" for m in ("fedavg", dbe) for s in (0, 1)]


def test_filter_shows_rows_with_all_words(page: Page, file: str) -> None:
    page.open(file)
    field = page.find("#runs-filter")
    field.send_keys("DBE seed 1")
    assert page.texts("#table-runs tbody th") == ["fedavg+dbe(kappa=0.5), seed 1"]
    assert page.texts("#table-runs tfoot th") == ["majority class"]  # neither filtered nor sorted
    assert page.texts(".count") == ["1 of 4"]
    field.clear()
    field.send_keys("x")  # clear alone does not send an input event
    field.send_keys(Keys.BACKSPACE)
    assert len(page.texts("#table-runs tbody th")) == 4


def test_hover_and_arrow_keys_read_values(page: Page, file: str) -> None:
    page.open(file)
    whole = json.loads(page.texts("#content")[0])
    curves = next(s for s in whole["sections"] if s["id"] == "curves")["blocks"][0]["panels"][0]
    plot = page.find("#learning-plot .u-over")
    page.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    ActionChains(page.driver).move_to_element_with_offset(plot, plot.size["width"] // 2 - 3, 0).perform()
    last = len(curves["x"]) - 1
    assert page.texts("#figure-learning .position") == [f"round {curves['x'][last]}"]
    values = page.texts("#figure-learning .value")
    for value, line in zip(values, curves["series"], strict=True):
        assert float(value.split(" ")[0]) == pytest.approx(line["y"][last], abs=0.01)
        assert " to " in value
    page.find("#learning-plot").send_keys(Keys.ARROW_LEFT)
    assert page.texts("#figure-learning .position") == [f"round {curves['x'][last - 1]}"]
    assert f"round {curves['x'][last - 1]}" in page.texts("#figure-learning .visually-hidden")[0]


def test_drawings_have_tooltips(opened_page: Page) -> None:
    for name, words in (("heat", "client"), ("labels", "samples"), ("differences", "mean")):
        canvas = opened_page.find(f"#figure-{name} canvas")
        opened_page.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
        ActionChains(opened_page.driver).move_to_element(canvas).perform()
        tip = opened_page.find(f"#figure-{name} .tip:not([hidden])")
        assert words in tip.text


def test_controls_change_the_picture_and_restore_it(page: Page, file: str) -> None:
    """Each control changes the picture, and restores it."""
    page.open(file)
    picture = "return document.querySelector('#figure-learning canvas').toDataURL()"
    steps = """
        const {chart} = document.querySelector('#learning-plot');
        const [a, b, c] = [1, 2, 4].map((value) => chart.valToPos(value, arguments[0]));
        return (b - a) / (c - b);
    """
    pictures = [page.script(picture)]
    for switch in ("#learning-logy", "#learning-logx"):
        page.find(switch).click()
        assert page.script(steps, switch[-1]) == pytest.approx(1), "each doubling has the same distance"
        assert page.script(picture) not in pictures
        pictures.append(page.script(picture))
    for switch in ("#learning-logx", "#learning-logy"):
        page.find(switch).click()
    assert [page.script(steps, axis) for axis in "xy"] == pytest.approx([0.5, 0.5])
    assert page.script(picture) == pictures[0]
    page.find("#figure-learning .key").click()
    assert page.find("#figure-learning .key").get_attribute("aria-pressed") == "false"
    assert page.script(picture) not in pictures
    page.find("#figure-learning .key").click()
    choice = Select(page.find("#learning-choice"))
    choice.select_by_visible_text("training loss")
    assert page.script(picture) not in pictures
    assert page.logged_errors() == []


def test_names_are_not_interpreted_as_markup(page: Page, tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    feddbe.run("fedavg", out=str(folder), rounds=1, **SMALL)
    store = RunStore.open(folder)
    with store.transaction(1):
        config = store.meta("config") | {"method": NAME, "data": f"digits{NAME}", "model": NAME}
        for key, value in {"config": config, "note": NAME, "remarks": [NAME, "</script>"]}.items():
            store.set_meta(key, value)
    store.close()
    page.open(write_report([folder], tmp_path / "x.html").as_uri())
    for summary in page.driver.find_elements(By.TAG_NAME, "summary"):
        summary.click()
    assert page.texts("#table-runs tbody th") == [NAME]
    assert NAME in page.driver.title
    assert page.script("return window.hacked") is None
    assert page.script("return document.querySelectorAll('img, script').length") == 2
    assert len(page.requests()) == 1
    assert page.logged_errors() == []


def _write_hostile_run(folder: Path) -> str:
    """Write a run whose data, method, note, analyses and versions have markup as names.

    Returns:
        The name of its first client.
    """
    names = [f"{FOLDER}{k}{NAME}" for k in range(4)]
    path = folder.parent / "table.csv"
    with path.open("w", newline="") as table:
        writer = csv.writer(table)
        writer.writerow([names[0], "client", "label"])
        writer.writerows([k % 5, names[k % 4], names[k * 7 % 3]] for k in range(80))
    options: dict[str, Any] = {"model": "mlp", "engine": "serial", "rounds": 2}
    feddbe.run("fedavg", data=f"{path}?label=label&client=client", out=str(folder), **options)
    feddbe.analyze(folder, analyses="confusion,tsne", moment="before", samples=20)
    file = RunFile(folder)
    config = file.meta("config") | {"method": NAME, "data": f"digits{NAME}", "model": FOLDER}
    analyses = file.meta("analyses")
    for values in analyses.values():
        values["settings"] = {NAME: NAME}
        if values["analysis"] == "confusion":  # points of tsne are stored by the name of their layer
            values["layer"] = FOLDER
    documents = {
        "config": config, "note": NAME, "remarks": [NAME, FOLDER, "</script>"], "analyses": analyses,
        "machine": NAME, "versions": {NAME: FOLDER}, "git_commit": FOLDER, "trainers": [NAME],
    }  # fmt: skip
    for key, value in documents.items():
        file.set_meta(key, json.dumps(value))
    file.db.close()
    return names[0]


@pytest.mark.parametrize("live", [False, True])
def test_names_of_clients_classes_columns_and_analyses_are_not_markup(
    live: bool, page: Page, tmp_path: Path
) -> None:
    damaged = tmp_path / "runs" / FOLDER
    damaged.mkdir(parents=True)
    (damaged / "run.sqlite").write_bytes(b"no database" * 99)
    client = _write_hostile_run(tmp_path / "<hacked-x>")
    with contextlib.ExitStack() as stack:
        if live:  # the page receives the run when it is open
            address = stack.enter_context(_serve(tmp_path / "runs"))
            page.clear_logs()
            page.driver.get(address)
            (tmp_path / "<hacked-x>").rename(tmp_path / "runs" / "<hacked-x>")
            page.until(lambda: not page.script("return painting()"), "the run is drawn")
        else:
            address = write_report([tmp_path / "<hacked-x>"], tmp_path / "x.html").as_uri()
            page.open(address)
        for summary in page.driver.find_elements(By.TAG_NAME, "summary"):
            page.driver.execute_script("arguments[0].click()", summary)
        for canvas in page.driver.find_elements(By.TAG_NAME, "canvas"):
            page.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
            ActionChains(page.driver).move_to_element(canvas).perform()
        assert client in page.script("return document.body.textContent")
        assert page.script("return window.hacked") is None
        scripts = page.script("return document.querySelectorAll('script').length")
        assert page.script("return document.querySelectorAll('img, script').length") == scripts == 2
        assert page.script("return document.querySelectorAll('hacked-x').length") == 0
        assert {url.removesuffix("content.json") for url in page.requests()} == {address}
        assert page.logged_errors() == []
        if live:
            assert FOLDER in page.texts(".failed")[0]


def test_content_security_policy_blocks_other_scripts(page: Page, file: str) -> None:
    page.open(file)
    page.script("document.body.append(Object.assign(document.createElement('script'), {text: 'hacked = 3'}))")
    assert page.script("return window.hacked") is None
    assert any("Content Security Policy" in complaint for complaint in page.logged_errors())


@pytest.mark.parametrize("width", [320, 375, 768])
def test_page_fits_a_narrow_screen(page: Page, file: str, width: int) -> None:
    page.open(file, width=width)
    for summary in page.driver.find_elements(By.TAG_NAME, "summary"):
        page.driver.execute_script("arguments[0].click()", summary)
    assert page.script("return document.documentElement.scrollWidth") <= width
    assert page.script("return canvases().every((c) => c.getBoundingClientRect().right <= innerWidth)")


def test_dark_theme_and_print(page: Page, file: str) -> None:
    """Drawings follow the theme; a printed page is dark on white."""
    brightness = """
        const [r, g, b] = getComputedStyle(document.body)[arguments[0]].match(/\\d+/g).map(Number);
        return (r + g + b) / 3;
    """
    picture = "return document.querySelector('#figure-heat canvas').toDataURL()"
    page.open(file)
    assert page.script(brightness, "backgroundColor") > 200 > 100 > page.script(brightness, "color")
    light = page.script(picture)
    page.set_theme(dark=True)
    page.until(lambda: page.script(picture) != light, "drawn again")
    assert page.script(brightness, "backgroundColor") < 60 < 180 < page.script(brightness, "color")
    page.script("dispatchEvent(new Event('beforeprint'))")
    assert page.script(brightness, "backgroundColor") > 200
    assert page.script(picture) == light
    page.script("dispatchEvent(new Event('afterprint'))")
    assert page.script(brightness, "backgroundColor") < 60
    printed = page.driver.execute_cdp_cmd("Page.printToPDF", {})["data"]
    assert len(printed) > 10_000
    assert page.logged_errors() == []


def test_a_page_without_runs_has_a_title(page: Page, tmp_path: Path) -> None:
    (tmp_path / "x.html").write_text(render(page_content(ReportRuns.from_runs([]), ["one is damaged"])))
    page.clear_logs()
    page.driver.get((tmp_path / "x.html").as_uri())
    assert page.texts("h1, .failed") == ["No run yet", "one is damaged"]
    assert page.logged_errors() == []


class WaitForPage(Callback):
    """Callback that continues a run as soon as the page shows its last round."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.progress_texts: list[str] = []

    def on_round_end(self, done: int, accuracy: float | None) -> None:
        expected = f"{done} of 3" if done < 3 else "3"
        rows = "#table-runs tbody td:nth-child(2)"
        self.page.until(lambda: expected[0] in "".join(self.page.texts(rows)), f"{expected} is shown")
        self.progress_texts += self.page.texts(rows)


def test_live_follows_a_run_round_by_round(page: Page, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with _serve(tmp_path / "runs") as address:
        assert address.startswith("http://127.0.0.1:")
        page.clear_logs()
        page.driver.get(address)
        assert page.texts("h1") == ["No run yet"]
        callback = WaitForPage(page)
        feddbe.run("fedavg", out=str(tmp_path / "runs" / "run"), rounds=3, callback=callback, **SMALL)
        page.until(lambda: page.texts("#table-runs tbody td:nth-child(2)") == ["3"], "the run is finished")
        assert {"1 of 3", "2 of 3"} <= set(callback.progress_texts)
        assert page.logged_errors() == []
        assert {url.rsplit("/", 1)[0] + "/" for url in page.requests()} == {address}
    page.until(lambda: "The server has stopped" in page.texts("#status")[0], "the status is shown")
