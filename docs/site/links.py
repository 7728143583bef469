"""Builds a page for each source file that the documentation links to.

Pages link to files of the checkout by relative paths, which work where the repository is browsed.
On the site, the same links lead to pages made here: the file, highlighted. A linked folder becomes
a list of its files.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
LINK = re.compile(r"\]\(((?:\.\./)+[^)#]*)(#[^)]*)?\)")
LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown", ".json": "json"}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file and folder outside docs/ that a page links to."""
    linked = set()
    for file in files.documentation_pages():
        for target, _ in LINK.findall(file.content_string):
            found = outside(file.src_uri, target)
            if found is not None:
                linked.add(found)
    for path in sorted(linked):
        files.append(File.generated(config, page_of(path), content=content(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave docs/ at the pages made by `on_files`."""

    def moved(match: re.Match[str]) -> str:
        found = outside(page.file.src_uri, match[1])
        if found is None:
            return match[0]
        here = PurePosixPath(page.file.src_uri).parent
        return f"]({os.path.relpath(page_of(found), here)})"

    return LINK.sub(moved, markdown)


def outside(page: str, target: str) -> PurePosixPath | None:
    """The file of the checkout, outside docs/, that a link of `page` leads to; else None."""
    path = (DOCS / page).parent.joinpath(target).resolve()
    within_site = path.is_relative_to(DOCS) and not path.is_relative_to(DOCS / "examples")
    if within_site or not path.is_relative_to(ROOT):
        return None
    return PurePosixPath(path.relative_to(ROOT).as_posix())


def page_of(path: PurePosixPath) -> str:
    """Where the page of a source file is."""
    return f"source/{path}.md"


def content(path: PurePosixPath) -> str:
    """The page: its file as it stands, or the names in its folder."""
    source = ROOT / path
    hidden = "---\nsearch: { exclude: true }\n---\n"
    if source.is_dir():
        names = sorted(each.name for each in source.iterdir() if each.name[0] not in "._")
        return f"{hidden}# {path}/\n\n" + "\n".join(f"* `{name}`" for name in names)
    language = LANGUAGES.get(source.suffix, "text")
    return f"{hidden}# {path}\n\n````{language}\n{source.read_text(encoding='utf-8')}````\n"
