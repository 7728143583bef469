"""Tries the settings that matter for an engine, and says which of them help.

```
changes ─ one each ─► search ─ same seeds, verdicts, the helpful ones together ─► statement
```
"""
