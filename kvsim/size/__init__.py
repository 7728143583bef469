"""The inverse question: how much is needed to keep the objectives, and how near is the cliff."""
