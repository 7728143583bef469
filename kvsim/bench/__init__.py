"""How fast is the simulator: workloads that anybody can rebuild, measured and compared."""
