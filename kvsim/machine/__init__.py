"""What serves: models, GPUs, the link to the CPU, and how many KV blocks fit into memory.

In go names and files of models and GPUs. Out come a geometry (`models`), data-sheet figures and
times of copies (`hardware`), and a budget of bytes and blocks (`memory`).
"""
