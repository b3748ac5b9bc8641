"""Photograph pages in a real browser: `python scripts/screenshots.py runs/one/report.html bench.html -o docs/`.

Needs chromium with chromedriver, and selenium, which the `dev` extra brings. A picture of each whole page; with
`--more` also the timeline with one microbatch chosen in dark mode, and the top of the page as a phone shows it.
"""

import argparse
import shutil
import sys
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait


def main() -> None:
    """Open the page at three sizes and save what is seen."""
    parser = argparse.ArgumentParser(prog="python scripts/screenshots.py")
    parser.add_argument("pages", type=Path, nargs="+", help="what `penstock report` or `bench --report` has written")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs"), help="where the pictures go")
    parser.add_argument("--more", action="store_true", help="also the timeline in dark mode, and a phone's view")
    given = parser.parse_args()
    missing = [str(page) for page in given.pages if not page.is_file()]
    if missing:
        sys.exit(f"there is no {', '.join(missing)}; make a page with penstock report RUN, or bench --report PAGE")
    given.output.mkdir(parents=True, exist_ok=True)  # the browser saves nothing into a folder that is missing
    for page in given.pages:
        browser = open_browser()
        try:
            photograph(browser, page, given.output, more=given.more)
        finally:
            browser.quit()


def photograph(browser: webdriver.Chrome, page: Path, folder: Path, *, more: bool) -> None:
    """Save what is seen of a page, under its name."""
    show(browser, page, width=1100, height=900)
    browser.set_window_size(1100, browser.execute_script("return document.documentElement.scrollHeight"))
    browser.save_screenshot(str(folder / f"{page.stem}.png"))
    if not more:
        return
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    show(browser, page, width=1100, height=700)
    timeline = browser.find_element("css selector", "#figure-timeline")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", timeline)
    timeline.send_keys(Keys.ARROW_RIGHT * 3)
    browser.save_screenshot(str(folder / f"{page.stem}-dark.png"))
    show(browser, page, width=500, height=1000)
    browser.save_screenshot(str(folder / f"{page.stem}-phone.png"))


def open_browser() -> webdriver.Chrome:
    """Start a browser without a window."""
    chromium, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        sys.exit("no browser here; install chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    return webdriver.Chrome(options=options, service=Service(driver))


def show(browser: webdriver.Chrome, page: Path, *, width: int, height: int) -> None:
    """Open the page and wait until its figures are drawn."""
    browser.set_window_size(width, height)
    browser.get(page.resolve().as_uri())
    WebDriverWait(browser, 60).until(lambda b: b.find_element("css selector", "body").get_attribute("data-drawn"))


if __name__ == "__main__":
    main()
