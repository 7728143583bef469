"""`python -m kvsim.schema > docs/reference/columns.md`."""

import sys

from kvsim.schema.reference import reference

sys.stdout.write(reference())
