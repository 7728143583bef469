"""What a run remembers: steps, transitions, token gaps, and requests that are over; packed."""
