"""Every link within the built site leads to a page, and its fragment to an element of it."""

import functools
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin, urlsplit


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.ids, self.links = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids |= {found[key] for key in ("id", "name") if found.get(key)}
        self.links |= {found[key] for key in ("href", "src") if found.get(key)}


@functools.cache
def read(path):
    return Page(path.read_text(encoding="utf-8"))


def test_links_hold(folder, where):
    here = f"/{where}/" if where != "." else "/"
    broken = []
    links = read(folder / where / "index.html").links
    assert len(links) > 10
    for link in links:
        parts = urlsplit(urljoin(f"http://site{here}", link))
        if parts.netloc != "site" or parts.scheme != "http":
            continue
        target = folder / unquote(parts.path).lstrip("/")
        target = target / "index.html" if parts.path.endswith("/") else target
        fragment = unquote(parts.fragment)
        if not target.exists() or (
            target.suffix == ".html"
            and fragment
            and not fragment.startswith(("__", ":~:"))
            and fragment not in read(target).ids
        ):
            broken.append(link)
    assert broken == []
