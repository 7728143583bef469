"""Many runs: which settings to try, each once, and what came of them."""
