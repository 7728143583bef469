"""Records a run step by step, in packed form: rows, transitions, and gaps between tokens."""
