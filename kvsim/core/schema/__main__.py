"""`python -m kvsim.core.schema > docs/reference/columns.md`."""

import sys

from kvsim.core.schema.reference import reference

sys.stdout.write(reference())
