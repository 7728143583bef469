"""Packs plotly.js into pages: its official cartesian bundle, compressed, with its licence.

The bundle has bars, lines, heat maps, histograms, boxes, contours, pies and images. It is npm's
`plotly.js-cartesian-dist-min`. To take another version, here in this folder:

```
npm pack plotly.js-cartesian-dist-min@VERSION
tar -xzf plotly.js-cartesian-dist-min-VERSION.tgz
gzip -n9 < package/plotly-cartesian.min.js > plotly-cartesian.min.js.gz
mv package/LICENSE plotly.LICENSE
```
"""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from importlib import resources


@cache
def packed_plotly() -> str:
    """The gzipped bundle in base64. The page's script unpacks it with a `DecompressionStream`."""
    bundle = resources.files(__package__).joinpath("plotly-cartesian.min.js.gz")
    return b64encode(bundle.read_bytes()).decode("ascii")
