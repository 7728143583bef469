"""One engine in simulated time: the event loop, who arrives when, and the link to the CPU pool."""
