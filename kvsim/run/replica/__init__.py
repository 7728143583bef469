"""One engine in simulated time: its event loop, its arriving requests, and the link to the CPU
pool."""
