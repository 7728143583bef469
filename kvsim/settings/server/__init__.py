"""What a user's real server says about itself: its log when it starts, and its command line.

```
--vllm-file ─ script ┐
--vllm ──────────────┴─ command ─ arguments, looked up in vllm_arguments ─ command_settings ┐
--startup-log ─ log ─ log_settings ─────────────────────────────────────────────────────────┴─ word
```
Nothing is simulated here: `server_settings` returns settings, and where each comes from. Each
engine has a table of its own: `vllm_arguments`, `sglang_arguments`.
"""

from kvsim.settings.server.word import ServerWord as ServerWord
from kvsim.settings.server.word import server_settings as server_settings
