"""Many runs: which settings to try, each combination once, and their results."""
