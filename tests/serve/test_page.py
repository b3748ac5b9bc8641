"""The page at / in a real browser: a chat that streams, stops and begins again, beside the stages."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browsers import browser_session
from tests.generate.tokens import save_model, tokenizer
from tests.serve.servers import Server, serving

KEY = "a-key-of-this-page-0123456789"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("page") / "small"
    folder.mkdir()
    save_model(folder, ends=False)
    endless = tokenizer()
    endless.eos_token = None
    endless.save_pretrained(folder)
    keys = folder.parent / "keys"
    keys.touch(0o600)
    keys.write_text(KEY)
    with serving(f"hf:{folder}", "--api-keys", keys, "--stages", 2, "--max-length", 512) as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browser_session(width=1200) as driver:
        yield driver


def until(browser: Any, look: Any) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 60).until(look)


def texts(browser: Any, role: str) -> list[str]:
    return [item.text for item in browser.find_elements("css selector", f"#messages .{role}")]


def shown(browser: Any, name: str) -> bool:
    return bool(browser.find_element("id", name).is_displayed())


def test_page_holds_a_chat(server: Server, browser: Any) -> None:
    browser.get(server.url)
    until(browser, lambda b: shown(b, "lock"))
    browser.find_element("id", "key").send_keys(KEY)
    browser.find_element("css selector", "#lock button").click()
    until(browser, lambda b: shown(b, "chat"))
    assert browser.find_element("id", "model").text == "small"
    until(browser, lambda b: len(b.find_elements("css selector", "#stages li")) == 2)
    box = browser.find_element("id", "text")
    box.send_keys("water <b>&\n")
    until(browser, lambda b: shown(b, "stop"))
    until(browser, lambda b: any(texts(b, "assistant")))
    browser.find_element("id", "stop").click()
    until(browser, lambda b: shown(b, "send") and b.find_element("id", "again").is_enabled())
    assert texts(browser, "user") == ["water <b>&"]
    (first,) = texts(browser, "assistant")
    browser.find_element("id", "again").click()
    until(browser, lambda b: shown(b, "stop"))
    until(browser, lambda b: any(texts(b, "assistant")))
    browser.find_element("id", "stop").click()
    until(browser, lambda b: shown(b, "send"))
    assert first
    assert len(texts(browser, "assistant")) == 1
    browser.find_element("id", "clear").click()
    assert not texts(browser, "user")
    # nothing was asked of another host, and nothing went wrong
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map((each) => each.name)")
    assert loaded
    assert all(name.startswith(server.url) for name in loaded)
    wrong = [each for each in browser.get_log("browser") if each["level"] == "SEVERE" and "401" not in each["message"]]
    assert not wrong
    # a phone
    browser.set_window_size(390, 800)
    wide = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    assert wide <= 0
    assert shown(browser, "send")
