"""Says where the time of every request and step, and every prompt token, went: exact sums."""
