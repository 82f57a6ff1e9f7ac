"""The built site, served on this machine, and a browser: `make test-site`."""

import functools
import http.server
import os
import shutil
import threading
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

# The first has no window to draw and is the lightest, where a distribution has it.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="session")
def folder(request):
    path = Path(request.config.getoption("--site")).resolve()
    assert (path / "404.html").exists(), f"expected a built site in {path}: mkdocs build"
    return path


@pytest.fixture(scope="session")
def address(folder):
    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def chromium():
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    assert path, f"expected a browser on PATH, one of {BROWSERS}, or its path in CHROMIUM"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """A page that keeps what its console says and what it asks for."""
    context = chromium.new_context(color_scheme="light")
    opened = context.new_page()
    opened.said, opened.asked = [], []
    opened.on("console", lambda m: opened.said.extend([m.text] * (m.type in ("error", "warning"))))
    opened.on("pageerror", lambda error: opened.said.append(str(error)))
    # A page that is left may still be fetching something.
    opened.on("requestfailed", lambda r: opened.said.extend([r.url] * ("ABORT" not in r.failure)))
    opened.on("request", lambda r: opened.asked.append(r.url))
    yield opened
    context.close()


def pytest_generate_tests(metafunc):
    """`where` is any page, `with_plot` one that has a plot."""
    for name in {"where", "with_plot"} & set(metafunc.fixturenames):
        site = Path(metafunc.config.getoption("--site"))
        files = sorted(site.rglob("index.html"))
        if name == "with_plot":
            files = [file for file in files if "data-plot" in file.read_text(encoding="utf-8")]
        assert len(files) > 10, f"expected a whole site in {site}, got {len(files)} pages {name}"
        metafunc.parametrize(name, [file.relative_to(site).parent.as_posix() for file in files])
