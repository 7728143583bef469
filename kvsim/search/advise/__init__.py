"""Tries the settings that matter for an engine, and says which of them help.

```
trials ─ one change each ─► search ─ same seeds, verdicts, the helpful ones together ─► wording
```
"""
