"""Draws the pictures of the site from pages that kvsim writes now.

    python docs/site/pictures.py            # needs Chromium
    python docs/site/pictures.py --check    # draws nothing; exit code 1 if a picture is stale

`docs/pictures/made.json` has a digest of what each picture shows: a figure, or a section of a page.
"""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
MADE = FOLDER / "made.json"
WIDTH_PX, CHROMIUM = 940, "/usr/bin/chromium"


class Picture(NamedTuple):
    """A part of a page."""

    name: str
    page: str
    """Its path in the folder of the runs."""
    part: str
    """The id of a figure or of a section."""


COMMANDS = (
    "run chat --num-gpu-blocks-override 2000 --out small",
    "run chat --num-gpu-blocks-override 3000 --out large --no-report",
    "diff small large --out diff",
    "compare chat naive prefix-caching --num-prompts 200 --num-gpu-blocks-override 900 --seeds 5"
    " --out seeds",
    "size burst --config capacity-cliff --slo p99_ttft<300ms --find num_gpu_blocks --seeds 2"
    " --out cliff",
    "cache curve chat --out curve.html",
    "run chat --num-prompts 400 --replicas 6 --router session-affinity --out fleet",
    "run chat --num-prompts 300 --replicas 3 --router sglang-cache_aware --out three",
    "run chat --engine vllm-v1 --out v1 --no-report",
    "run chat --engine sglang --out sglang --no-report",
    "diff v1 sglang --out engines",
    "run chat --engine sglang --num-prompts 300 --num-gpu-blocks-override 20000 --out radix",
    'run chat --num-prompts 300 --speculative-config \'{"method": "eagle3",'
    ' "num_speculative_tokens": 3, "synthetic_acceptance_length": 2.4}\' --out drafts',
)
PICTURES = (
    Picture("ledger", "small/report.html", "where-time-went"),
    Picture("waits", "small/report.html", "waits"),
    Picture("step-tokens", "small/report.html", "step-tokens"),
    Picture("utilisation", "small/report.html", "utilisation"),
    Picture("diff", "diff/diff.html", "fall-mean-e2el"),
    Picture("intervals", "seeds/comparison.html", "intervals"),
    Picture("cliff", "cliff/size.html", "whole-p99_ttft_ms"),
    Picture("curve", "curve.html", "hits"),
    Picture("heat", "fleet/report.html", "heat"),
    Picture("drafts", "drafts/report.html", "drafts"),
    Picture("found", "three/report.html", "found"),
    Picture("engines", "engines/diff.html", "fall-mean-e2el"),
    Picture("radix", "radix/report.html", "gpu-blocks"),
)


def made(folder: Path) -> dict[str, str]:
    """Make the pages in this folder; the digest of what each picture shows, by its name."""
    for name in ("traces", "configs"):
        (folder / name).symlink_to(ROOT / name)
    env = {**os.environ, "KVSIM_INTERPRETED": "0"}
    for command in COMMANDS:
        words = [sys.executable, "-m", "kvsim", *shlex.split(command), "--quiet"]
        subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=env)
    return {each.name: digest((folder / each.page).read_text(), each.part) for each in PICTURES}


def digest(page: str, part: str) -> str:
    """What says whether a part of a page has changed."""
    shown = "".join(_parts(page, part))
    if not shown:
        raise SystemExit(f"pictures: no part {part}")
    return hashlib.sha256(shown.encode()).hexdigest()[:16]


def _parts(page: str, part: str) -> Iterator[str]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page)
    for figure in json.loads(found[1]) if found else ():
        if figure["id"] == part:
            yield json.dumps(figure)
    if section := re.search(rf'<section id="{re.escape(part)}">.*?</section>', page, re.DOTALL):
        yield section[0]


def draw(folder: Path) -> None:
    """Photograph every picture."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": WIDTH_PX, "height": 900}, color_scheme="light")
        there = ""
        for each in PICTURES:
            if each.page != there:
                there = each.page
                tab.goto((folder / there).as_uri())
                tab.wait_for_selector("html[data-drawn=true]")
                tab.add_style_tag(content="nav { display: none; }")
            part = tab.locator(f'[id="{each.part}"]')
            framed = [tab.locator("figure", has=part), part.locator(".panel").first]
            whole = next(frame for frame in framed if frame.count())
            whole.screenshot(path=FOLDER / f"{each.name}.png")
        browser.close()


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        now = made(Path(folder))
        if "--check" in arguments:
            known = json.loads(MADE.read_text(encoding="utf-8"))
            stale = sorted(name for name in now if known.get(name) != now[name])
            print(f"stale: {', '.join(stale)}" if stale else "all pictures are fresh")
            return int(bool(stale))
        draw(Path(folder))
    MADE.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
