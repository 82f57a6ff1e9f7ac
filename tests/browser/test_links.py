"""The built files for language models. Links are checked by the build, which is strict."""

import re


def test_the_files_for_language_models_name_every_english_page(folder):
    short, whole = ((folder / name).read_text("utf-8") for name in ("llms.txt", "llms-full.txt"))
    pages = {path.parent.relative_to(folder).as_posix() for path in folder.rglob("index.html")}
    english = {page for page in pages if page.split("/")[0] not in ("ko", "ja", "tests", ".")}
    linked = [f"/{target.strip('/')}/" for target in re.findall(r"\]\(([^)]+)\)", short)]
    assert [page for page in english if not any(x.endswith(f"/{page}/") for x in linked)] == []
    assert "# Quickstart" in whole
    assert "calibrate(" in whole
    assert "--8<--" not in whole
