"""What a run remembers step by step: rows, transitions, gaps between tokens; packed."""
